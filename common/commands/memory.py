"""Releases device memory while nothing is served, and takes it again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..api.errors import InvalidRequest
from .base import GET_OR_POST, LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .registry import COMMANDS

MemoryKind = Literal["weights", "kv_cache"]


class ReleaseMemory(msgspec.Struct, frozen=True):
    """Free the device memory of weights (copied to host memory) or of the KV pool (discarded). Refused while requests
    run; requests are refused until ``ResumeMemory``."""

    kinds: tuple[MemoryKind, ...]


class ResumeMemory(msgspec.Struct, frozen=True):
    """Allocate released memory again."""

    kinds: tuple[MemoryKind, ...]


class MemoryRequest(msgspec.Struct):
    tags: tuple[MemoryKind, ...] | None = None


def run_release(rank: Rank, command: ReleaseMemory) -> str:
    if "kv_cache" in command.kinds and rank.config.duties.transfers_kv:
        # Peers know the addresses of this pool, and a transfer library has registered it.
        raise InvalidRequest("The KV pool of a prefill or decode server stays where peers know it; release "
                             'only tags ["weights"].', param="tags")
    new = set(command.kinds) - rank.released
    if "kv_cache" in new:
        rank.batcher.cache.flush()
    rank.runner.release(new)
    rank.released |= new
    return _sentence("released", new)


def run_resume(rank: Rank, command: ResumeMemory) -> str:
    return resume(rank, command.kinds)


def resume(rank: Rank, kinds: Iterable[MemoryKind]) -> str:
    """Allocates what of ``kinds`` is released."""
    due = set(kinds) & rank.released
    rank.runner.resume(due, complete=due == rank.released)
    rank.released -= due
    if rank.runner.chain_levels is None:  # where they were not captured again, such steps are eager
        rank.batcher.chains = None
        if rank.batcher.drafting is not None:
            rank.batcher.drafting.keeps_drafts = False
    return _sentence("resumed", due)


def _sentence(verb: str, kinds: set[MemoryKind]) -> str:
    return f"{' and '.join(sorted(kinds)) or 'nothing'} {verb}."


async def release_memory_occupation(server: Server, body: MemoryRequest) -> str:
    """Releases the device memory of weights and KV pool, or of ``tags``; 409 while requests run.

    ``weights`` are kept in host memory; the pages of ``kv_cache`` are lost, and a server of a pair cannot release it.
    Requests are refused until it is resumed.
    """
    return await server.execute(ReleaseMemory(_kinds(server, body)))


async def resume_memory_occupation(server: Server, body: MemoryRequest) -> str:
    """Allocates memory again that ``/release_memory_occupation`` released: all of it, or ``tags``."""
    return await server.execute(ResumeMemory(_kinds(server, body)))


def _kinds(server: Server, body: MemoryRequest) -> tuple[MemoryKind, ...]:
    if body.tags is not None:
        return body.tags
    return ("weights",) if server.context.config.duties.transfers_kv else ("weights", "kv_cache")


COMMANDS.register("release_memory_occupation")(Command(ReleaseMemory, run_release, (
    Endpoint("/release_memory_occupation", release_memory_occupation, MemoryRequest, methods=GET_OR_POST,
             broadcast=Broadcast(slow=True)),
), timeout=LOAD_SECONDS))
COMMANDS.register("resume_memory_occupation")(Command(ResumeMemory, run_resume, (
    Endpoint("/resume_memory_occupation", resume_memory_occupation, MemoryRequest, methods=GET_OR_POST,
             broadcast=Broadcast(slow=True)),
), timeout=LOAD_SECONDS))
