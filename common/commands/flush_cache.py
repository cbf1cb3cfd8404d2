"""Empties the prefix cache."""

from __future__ import annotations

import msgspec

from ..api.errors import Conflict, InvalidRequest
from .base import GET_OR_POST, Command, Endpoint, Rank, Server
from .registry import COMMANDS


class FlushCache(msgspec.Struct, frozen=True):
    """Drop the prefix cache. Refused while requests run."""


def run(rank: Rank, command: FlushCache) -> str:
    rank.batcher.cache.flush()
    return "The prefix cache is empty."


async def flush_cache(server: Server, body: None) -> str:
    """Drops the prefix cache; 400, as SGLang answers, while requests run."""
    try:
        return await server.execute(FlushCache())
    except Conflict as error:
        raise InvalidRequest(error.message, code=error.code) from None


COMMANDS.register("flush_cache")(Command(FlushCache, run, (
    Endpoint("/flush_cache", flush_cache, methods=GET_OR_POST),)))
