"""An administrative command of user code, in one file: counts the KV pool's pages of one state."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.common.commands.base import Broadcast, Command, Rank, messages_by_worker, plain_endpoint
from baton.common.commands.registry import COMMANDS


class CountPages(msgspec.Struct, frozen=True):
    """Counts the pages of one state."""

    state: Literal["free", "allocated", "cached"] = "free"


def run(rank: Rank, command: CountPages) -> str:
    count = getattr(rank.batcher.cache, f"num_{command.state}")
    return f"{count} of {rank.batcher.cache.num_pages} pages are {command.state}."


COMMANDS.register("count_pages")(Command(CountPages, run, (
    plain_endpoint("/count_pages", CountPages, broadcast=Broadcast(combine=messages_by_worker)),), while_busy=True))
