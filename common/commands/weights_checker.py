"""Checks that weights were transferred whole: checksums, and a comparison with a snapshot."""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from ..api.errors import InvalidRequest
from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .registry import COMMANDS
from .weight_update import refresh_identity

_SHOWN_NAMES = 5


class CheckWeights(msgspec.Struct, frozen=True):
    """Take a snapshot of the weights, compare them with it, or compute their checksums."""

    action: Literal["snapshot", "compare", "checksum"]


class ResetWeights(msgspec.Struct, frozen=True):
    """Overwrite all weights with random values. Refused while requests run that are not paused."""


class CheckRequest(msgspec.Struct):
    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"


def run_check(rank: Rank, command: CheckWeights) -> str:
    weights = rank.weights
    if command.action == "snapshot":
        return _answer(f"{weights.take_snapshot()} bytes a rank are in the snapshot.")
    if command.action == "checksum":
        checksum, per_rank = weights.checksums()
        return _answer(f"The checksum of the weights is {checksum}.", checksum=checksum, ranks=per_rank)
    differing = weights.differing()
    if differing:
        more = f" and {len(differing) - _SHOWN_NAMES} more" if len(differing) > _SHOWN_NAMES else ""
        raise InvalidRequest(f"The weights differ from the snapshot: {', '.join(differing[:_SHOWN_NAMES])}{more}.")
    return _answer("The weights are those of the snapshot.")


def run_reset(rank: Rank, command: ResetWeights) -> str:
    rank.peers.leave()
    rank.weights.reset()
    rank.forget_pages()
    rank.tp.barrier()
    rank.peers.join(rank.runner.model, rank.runner.draft_identity)
    rank.tp.barrier()
    return _answer("The weights are random.")


def _answer(message: str, **facts: object) -> str:
    return json.dumps({"success": True, "message": message, **facts})


async def weights_checker(server: Server, body: CheckRequest) -> str:
    """Checks the weights: ``checksum`` answers with a checksum, equal for equal weights on servers of one parallel
    layout, and each rank's; ``snapshot`` copies them to host memory; ``reset_tensors`` overwrites them with random
    values; ``compare`` is 400 where they differ from the snapshot."""
    if body.action == "reset_tensors":
        async with server.context.status.weights_lock:
            done = await server.execute(ResetWeights())
            await refresh_identity(server)
            return done
    return await server.execute(CheckWeights(body.action))


COMMANDS.register("check_weights")(Command(CheckWeights, run_check, (
    Endpoint("/weights_checker", weights_checker, CheckRequest, returns_json=True, broadcast=Broadcast(slow=True)),),
    while_busy=True, synchronizes=True, timeout=LOAD_SECONDS))
COMMANDS.register("reset_weights")(Command(ResetWeights, run_reset, (), while_paused=True, synchronizes=True,
                                           timeout=LOAD_SECONDS))
