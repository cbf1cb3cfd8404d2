"""Empties the prefix cache."""

from __future__ import annotations

import msgspec

from .base import Command, Rank, plain_endpoint
from .registry import COMMANDS


class FlushCache(msgspec.Struct, frozen=True):
    """Drops the prefix cache; 409 while requests run."""


def run(rank: Rank, command: FlushCache) -> str:
    rank.batcher.cache.flush()
    return "The prefix cache is empty."


COMMANDS.register("flush_cache")(Command(FlushCache, run, (
    plain_endpoint("/flush_cache", FlushCache, methods=("GET", "POST")),)))
