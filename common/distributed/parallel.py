"""The process groups of one engine rank: world, TP, attention TP, DP, EP and PP."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .expert_parallel import ExpertParallel
from .pipeline_parallel import PPLink, PPStages
from .token_exchange import TokenExchange
from .tp import DistBackend, TPGroup, init_tp

OVERLAP_CTAS = 16
"""CTAs (SMs) of a collective that overlaps with computation."""
_PP_MAX_CTAS = 8
"""CTAs (SMs) of a send or a receive at most: with 8 of an H200's 132, two pipeline stages were 1.88 times as fast as
one GPU, which is all that filling and draining leave."""


class Parallel:
    """The groups of one rank.

    - ``world``: all ranks of the engine. Without pipeline parallelism it is ``tp``.
    - ``tp``: the ranks of this rank's pipeline stage, over which MLPs and experts are split.
    - ``attn_tp``, ``dp``: with data-parallel attention (``dp_size`` above 1) ``tp`` consists of ``dp_size`` attention
      groups of neighbouring ranks. Each has requests, a KV pool and a schedule of its own; attention heads and the
      token embedding are split over its ranks, ``attn_tp``. ``dp`` holds the ranks with this rank's index in each
      attention group. With ``dp_size`` 1, ``attn_tp`` is ``tp`` and ``dp`` is this rank alone.
    - ``pp``: this rank's pipeline stage.
    - ``experts``: this rank's part of the experts of an MoE model.

    ``token_exchange`` gathers the rows of all attention groups for what ``tp`` computes in a layer, ``logits_exchange``
    those for the LM head, which is split over ``lm_head_tp``.
    """

    def __init__(self, tp: TPGroup | None = None, attn_tp: TPGroup | None = None, dp: TPGroup | None = None,
                 experts: ExpertParallel | None = None, *, dp_head: bool = False, pp: PPStages | None = None,
                 world: TPGroup | None = None, dp_overlap: TPGroup | None = None):
        """Without arguments a single rank; with ``tp`` alone, tensor parallelism over all of it. ``dp_head``: every
        attention group has a whole LM head. ``dp_overlap``: a second ``dp``, see ``overlap_exchange``."""
        self.tp = tp or TPGroup()
        self.pp = pp or PPStages()
        self.world = world or self.tp
        self.attn_tp = attn_tp or self.tp
        self.dp = dp or TPGroup(device=self.tp.device)
        attn_tp_is_one = self.attn_tp.size == 1 and self.dp.size > 1
        share = experts or ExpertParallel(self.tp)
        low_latency = attn_tp_is_one and share.a2a in ("low_latency", "peer")
        self.token_exchange = TokenExchange(self.dp, self.attn_tp, low_latency=low_latency,
                                            all_to_all=attn_tp_is_one and share.a2a == "peer")
        self.experts = replace(share, attn_tp_is_one=attn_tp_is_one, low_latency=self.token_exchange.low_latency,
                               all_to_all=self.token_exchange.all_to_all)
        self.dp_overlap = dp_overlap or self.dp
        self.lm_head_tp = self.attn_tp if dp_head else self.tp
        self.logits_exchange = TokenExchange(TPGroup() if dp_head else self.dp)
        assert self.attn_tp.size * self.dp.size == self.tp.size

    def overlap_exchange(self) -> TokenExchange:
        """Creates another exchange like ``token_exchange``, for prefill micro-batches. Its collectives leave SMs free
        for computation."""
        return TokenExchange(self.dp_overlap, self.attn_tp)

    @property
    def dp_rank(self) -> int:
        return self.dp.rank

    @property
    def dp_size(self) -> int:
        return self.dp.size

    @property
    def device(self) -> torch.device:
        return self.tp.device

    def close(self) -> None:
        self.world.close()

    def __repr__(self) -> str:
        part = f"dp rank {self.dp_rank} of {self.dp_size}" if self.pp.size == 1 else repr(self.pp)
        return f"Parallel(rank {self.tp.rank} of {self.tp.size}, {part})"


def init_parallel(rank: int, size: int, dp_size: int, init_method: str, device: torch.device | str,
                  timeout: float = 600.0, *, experts: Callable[[TPGroup], ExpertParallel] = ExpertParallel,
                  dp_head: bool = False, pp_size: int = 1, pp_partition: Sequence[int] = (),
                  overlap: bool = False, backend: DistBackend = "nccl") -> Parallel:
    """Joins the engine's groups as ``rank`` of ``size``.

    ``dp_size`` divides ``size``. With ``pp_size`` stages, neighbouring ranks form one, and ``dp_size`` is 1.
    ``overlap`` creates ``Parallel.dp_overlap``. See ``init_tp`` for the other arguments.
    """
    world = init_tp(rank, size, init_method, device, timeout, backend)
    if pp_size > 1:
        assert dp_size == 1
        return _init_pipeline(world, pp_size, pp_partition, experts, timedelta(seconds=timeout))
    share = experts(world)
    if dp_size == 1:
        return Parallel(world, experts=share)
    width = size // dp_size
    attn_tp_ranks = [list(range(first, first + width)) for first in range(0, size, width)]
    dp_ranks = [list(range(index, size, width)) for index in range(width)]
    limit = timedelta(seconds=timeout)
    # Every rank creates all groups, in one order: new_group is a collective of the whole world.
    attn_tp = [_subgroup(world, ranks, limit) for ranks in attn_tp_ranks]
    dp = [_subgroup(world, ranks, limit) for ranks in dp_ranks]
    dp_overlap = [overlap_group(world, ranks, limit) for ranks in dp_ranks] if overlap else [None] * width
    return Parallel(world, attn_tp[rank // width], dp[rank % width], share, dp_head=dp_head,
                    dp_overlap=dp_overlap[rank % width])


def _init_pipeline(world: TPGroup, pp_size: int, partition: Sequence[int], experts: Callable[[TPGroup], ExpertParallel],
                   limit: timedelta) -> Parallel:
    width = world.size // pp_size
    stage_ranks = [list(range(first, first + width)) for first in range(0, world.size, width)]
    tp_groups = [_subgroup(world, ranks, limit) for ranks in stage_ranks]
    # A group for each pair, so that a stage's sends never wait for its receives.
    channels = [PPLink(_pair(world, [rank, rank + width], limit), max_in_flight=pp_size + 2,
                       through_host=world.through_host)
                for rank in range(world.size - width)]
    pp_rank, tp = world.rank // width, tp_groups[world.rank // width]
    pp = PPStages(pp_rank, pp_size, partition=partition,
                  from_previous=channels[world.rank - width] if pp_rank else None,
                  to_next=channels[world.rank] if pp_rank < pp_size - 1 else None)
    return Parallel(tp, experts=experts(tp), pp=pp, world=world)


def _pair(world: TPGroup, ranks: list[int], limit: timedelta) -> dist.ProcessGroup:
    if world.device_group is None:
        gloo: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=limit)
        return gloo
    # It warns that sends of one group wait for each other, which is why every pair has its own.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # A send occupies its SMs until the next stage receives it, which may be a chunk later.
    options.config.max_ctas = _PP_MAX_CTAS
    nccl: dist.ProcessGroup = dist.new_group(ranks, backend="nccl", timeout=limit, pg_options=options)
    return nccl


def overlap_group(world: TPGroup, ranks: list[int], limit: timedelta, ctas: int = OVERLAP_CTAS) -> TPGroup:
    """Creates a group for collectives that run while the GPUs compute: they take ``ctas`` SMs on a high-priority
    stream, so that they start when SMs become free, not after all enqueued kernels."""
    options = None
    if world.device_group is not None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = limit
        options.config.max_ctas = ctas
    return _subgroup(world, ranks, limit, options)


def _subgroup(world: TPGroup, ranks: list[int], limit: timedelta,
              options: Any = None) -> TPGroup:
    """Creates a group of these ranks of the world; only its members may use it. ``options`` are ProcessGroupNCCL's."""
    index = ranks.index(world.rank) if world.rank in ranks else -1
    if len(ranks) == 1:
        return TPGroup(0, 1, world.device)
    host = dist.new_group(ranks, backend="gloo", timeout=limit)
    device = None
    if world.device_group is not None:
        device = dist.new_group(ranks, backend="nccl", timeout=limit, pg_options=options)
    return TPGroup(index, len(ranks), world.device, host_group=host, device_group=device)
