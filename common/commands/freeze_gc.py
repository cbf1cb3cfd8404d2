"""Takes what is loaded out of the garbage collector's sight."""

from __future__ import annotations

import msgspec

from ..garbage_collector import freeze_collector
from .base import GET_OR_POST, Command, Endpoint, Rank, Server
from .registry import COMMANDS


class FreezeGC(msgspec.Struct, frozen=True):
    """Collect garbage, and walk the objects that are left never again."""


def run(rank: Rank, command: FreezeGC) -> str:
    freeze_collector()
    return "The garbage collectors are frozen."


async def freeze_gc(server: Server, body: None) -> str:
    """Freezes the garbage collectors of the server's processes, as they are once after the start: collections walk none
    of the objects that are there now."""
    done = await server.execute(FreezeGC())
    server.context.status.freeze_garbage()
    return done


COMMANDS.register("freeze_gc")(Command(FreezeGC, run, (
    Endpoint("/freeze_gc", freeze_gc, methods=GET_OR_POST),), while_busy=True))
