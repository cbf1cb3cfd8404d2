"""One rank's place among the groups of its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .expert_share import ExpertShare
from .pipeline_parallel import PPLink, PPStages
from .token_exchange import TokenExchange
from .tp import DistBackend, TPGroup, init_tp

BESIDE_CTAS = 16
"""Multiprocessors of an exchange that runs beside other work."""
_PAIR_CTAS = 8
"""Multiprocessors of a send or a receive at most: with 8 of an H200's 132, two stages were 1.88 times as fast as one
GPU, which is all that filling and draining leave."""


class Parallel:
    """``world``: all ranks of the engine, and what MLPs and experts are split over (``mlp`` is its name there).

    With pipeline parallelism ``world`` is this rank's stage of ``stages``, and ``everyone`` all ranks of all stages.

    With data-parallel attention (``dp_size`` above 1) the ranks form ``dp_size`` attention groups of neighbouring
    ranks. Each has requests, a KV pool and a schedule of its own; heads and the token embedding are split over it.
    ``across`` holds one rank of each attention group: those with this rank's place in theirs. With ``dp_size`` 1
    ``attention`` is the world, and ``across`` this rank alone. ``experts`` is this rank's share of those of a mixture.

    ``tokens`` brings the rows of all attention groups together for what the world computes in a layer, ``scored`` those
    for the head, which is split over the ranks of ``head``.
    """

    def __init__(self, world: TPGroup | None = None, attention: TPGroup | None = None, across: TPGroup | None = None,
                 experts: ExpertShare | None = None, *, dp_head: bool = False, stages: PPStages | None = None,
                 everyone: TPGroup | None = None, beside: TPGroup | None = None):
        """Without arguments a single rank; with a world alone, tensor parallelism over all of it. ``dp_head``: every
        attention group has the model's head for itself. ``beside``: ``across`` once more, see ``exchange_beside``."""
        self.world = world or TPGroup()
        self.stages = stages or PPStages()
        self.everyone = everyone or self.world
        self.attention = attention or self.world
        self.across = across or TPGroup(device=self.world.device)
        apart = self.attention.size == 1 and self.across.size > 1
        share = experts or ExpertShare(self.world)
        meets = apart and share.a2a in ("low_latency", "peer")
        self.tokens = TokenExchange(self.across, self.attention, low_latency=meets,
                                    sends=apart and share.a2a == "peer")
        self.experts = replace(share, apart=apart, meeting=self.tokens.decode, sent=self.tokens.sent)
        self.beside = beside or self.across
        self.head = self.attention if dp_head else self.world
        self.scored = TokenExchange(TPGroup() if dp_head else self.across)
        assert self.attention.size * self.across.size == self.world.size

    def exchange_beside(self) -> TokenExchange:
        """One like ``tokens``, of prompts and with counts of its own, by messages that leave GPUs room to compute."""
        return TokenExchange(self.beside, self.attention)

    @property
    def mlp(self) -> TPGroup:
        return self.world

    @property
    def dp_rank(self) -> int:
        return self.across.rank

    @property
    def dp_size(self) -> int:
        return self.across.size

    @property
    def device(self) -> torch.device:
        return self.world.device

    def close(self) -> None:
        self.everyone.close()

    def __repr__(self) -> str:
        part = f"dp rank {self.dp_rank} of {self.dp_size}" if self.stages.size == 1 else repr(self.stages)
        return f"Parallel(rank {self.world.rank} of {self.world.size}, {part})"


def init_parallel(rank: int, size: int, dp_size: int, init_method: str, device: torch.device | str,
                  timeout: float = 600.0, *, experts: Callable[[TPGroup], ExpertShare] = ExpertShare,
                  dp_head: bool = False, pp_size: int = 1, pp_partition: Sequence[int] = (),
                  beside: bool = False, backend: DistBackend = "nccl") -> Parallel:
    """Join the engine's groups as ``rank`` of ``size``, which ``dp_size`` divides; see ``init_tp``,
    ``ExpertShare`` and ``Parallel``. With ``pp_size`` stages, neighbouring ranks are one; ``dp_size`` is 1 then."""
    world = init_tp(rank, size, init_method, device, timeout, backend)
    if pp_size > 1:
        assert dp_size == 1
        return _init_stages(world, pp_size, pp_partition, experts, timedelta(seconds=timeout))
    share = experts(world)
    if dp_size == 1:
        return Parallel(world, experts=share)
    width = size // dp_size
    rows = [list(range(first, first + width)) for first in range(0, size, width)]
    columns = [list(range(place, size, width)) for place in range(width)]
    limit = timedelta(seconds=timeout)
    # Every rank makes all groups, in one order: new_group is a collective of the whole world.
    attention = [_subgroup(world, ranks, limit) for ranks in rows]
    across = [_subgroup(world, ranks, limit) for ranks in columns]
    others = [group_beside(world, ranks, limit) for ranks in columns] if beside else [None] * width
    return Parallel(world, attention[rank // width], across[rank % width], share, dp_head=dp_head,
                    beside=others[rank % width])


def _init_stages(everyone: TPGroup, count: int, partition: Sequence[int], experts: Callable[[TPGroup], ExpertShare],
                 limit: timedelta) -> Parallel:
    width = everyone.size // count
    rows = [list(range(first, first + width)) for first in range(0, everyone.size, width)]
    worlds = [_subgroup(everyone, ranks, limit) for ranks in rows]
    # A group for each pair, so that what a stage sends never waits behind what it receives.
    ways = [PPLink(_pair(everyone, [rank, rank + width], limit), kept=count + 2, through_host=everyone.through_host)
            for rank in range(everyone.size - width)]
    index, world = everyone.rank // width, worlds[everyone.rank // width]
    stages = PPStages(index, count, partition=partition, inward=ways[everyone.rank - width] if index else None,
                      outward=ways[everyone.rank] if index < count - 1 else None)
    return Parallel(world, experts=experts(world), stages=stages, everyone=everyone)


def _pair(everyone: TPGroup, ranks: list[int], limit: timedelta) -> dist.ProcessGroup:
    if everyone.device_group is None:
        gloo: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=limit)
        return gloo
    # It warns that sends of one group wait for each other, which is why every pair has its own.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # A send occupies its multiprocessors until the next stage takes it in, which may be a chunk later.
    options.config.max_ctas = _PAIR_CTAS
    nccl: dist.ProcessGroup = dist.new_group(ranks, backend="nccl", timeout=limit, pg_options=options)
    return nccl


def group_beside(world: TPGroup, ranks: list[int], limit: timedelta, ctas: int = BESIDE_CTAS) -> TPGroup:
    """As ``_subgroup``, for messages that travel while the GPUs compute: they take ``ctas`` multiprocessors, and these
    as soon as one is free, not behind all that is enqueued."""
    options = None
    if world.device_group is not None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = limit
        options.config.max_ctas = ctas
    return _subgroup(world, ranks, limit, options)


def _subgroup(world: TPGroup, ranks: list[int], limit: timedelta,
              options: Any = None) -> TPGroup:
    """A group of these ranks of the world; only its members may use it. ``options``: ProcessGroupNCCL's."""
    place = ranks.index(world.rank) if world.rank in ranks else -1
    if len(ranks) == 1:
        return TPGroup(0, 1, world.device)
    host = dist.new_group(ranks, backend="gloo", timeout=limit)
    device = None
    if world.device_group is not None:
        device = dist.new_group(ranks, backend="nccl", timeout=limit, pg_options=options)
    return TPGroup(place, len(ranks), world.device, host_group=host, device_group=device)
