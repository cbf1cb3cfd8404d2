"""Pauses generation and continues it."""

from __future__ import annotations

from typing import Literal

import msgspec

from .base import Command, Endpoint, Rank, Server
from .registry import COMMANDS

PauseMode = Literal["abort", "retract", "in_place"]


class PauseGeneration(msgspec.Struct, frozen=True):
    """Launch no step until ``ContinueGeneration``. With ``retract`` running requests are retracted: they are recomputed
    later, with the weights of that time. With ``in_place`` they keep their pages; with ``abort`` the sender of this
    command aborts them too."""

    mode: PauseMode = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True):
    """Continue after ``PauseGeneration``."""


class PauseRequest(msgspec.Struct):
    mode: PauseMode | None = None


def run_pause(rank: Rank, command: PauseGeneration) -> str:
    mode = command.mode
    if mode == "retract" and (not rank.config.duties.decodes or rank.config.model.is_embedding):
        mode = "in_place"  # computed pages are being sent to decode, or are part of a mean
    rank.batcher.pause(mode)
    return "Generation is paused."


def run_continue(rank: Rank, command: ContinueGeneration) -> str:
    rank.check_serving()
    rank.batcher.paused = None
    return "Generation continues."


async def pause_generation(server: Server, body: PauseRequest) -> str:
    """Pauses generation until ``/continue_generation``; new requests wait. Running ones end ("abort", the default), are
    retracted ("retract"), or keep their pages ("in_place").

    Retracted requests are computed again afterwards: the cache can be flushed or the weights changed in between. A
    pair's prefill server has no ``retract``: its prompts stay as they are, and fail when the pause outlasts
    ``--disaggregation-bootstrap-timeout`` or ``--kv-transfer-timeout``.
    """
    mode = body.mode or "abort"
    with server.context.client.hold_requests():
        done = await server.execute(PauseGeneration(mode))
    if mode == "abort":
        server.context.client.abort_sent()
    return done


async def continue_generation(server: Server, body: None) -> str:
    """Resumes generation after ``/pause_generation``."""
    done = await server.execute(ContinueGeneration())
    server.context.client.send_held()
    return done


COMMANDS.register("pause_generation")(Command(PauseGeneration, run_pause, (
    Endpoint("/pause_generation", pause_generation, PauseRequest, fields={"status": "ok"}),),
    while_busy=True, synchronizes=True, timeout=10.0))
COMMANDS.register("continue_generation")(Command(ContinueGeneration, run_continue, (
    Endpoint("/continue_generation", continue_generation, fields={"status": "ok"}),), while_busy=True, timeout=10.0))
