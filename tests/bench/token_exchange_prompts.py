"""What ``token_exchange --prompts`` measures: a layer's exchange in steps of prompts, between as many GPUs as ranks.

Each rank has so many rows, each of which chooses ``CHOICES`` of ``EXPERTS`` experts at random; the ranks hold equal
parts of them. ``gather`` and ``scatter`` are NCCL's, of all rows to all ranks and of the sums back; ``sum`` is the
kernel that adds up a token's experts ahead of it. ``there`` and ``back`` are NCCL's all-to-all of the rows that a rank
wants, whose counts the host knows here; in a model it has to wait for them. ``dispatch`` and ``combine`` are
``--moe-a2a-backend peer``: the rows that a rank wants into its memory, in float8 too, and sum and way back in one
kernel. ``parts`` is the norm behind it, which adds up what the ranks have made, and ``norm`` the one behind NCCL's.
``link`` is what the bytes of the wanted rows take one way, at the rate of one large copy each way at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...common.distributed.dispatch_buffers import DispatchBuffers
from ...common.distributed.parallel import Parallel
from ...kernels.comm.all_to_all import all_to_all_combine, all_to_all_dispatch, reduce_combined
from ...kernels.comm.dispatch_buffers import DispatchLayout, DispatchMemory
from ...kernels.moe.moe_sum import moe_sum
from ...kernels.rowwise.rmsnorm import rmsnorm

EXPERTS, CHOICES = 128, 8
COLUMNS = ("link", "gather", "sum", "scatter", "norm", "there", "back", "dispatch", "dispatch float8", "combine",
           "parts", "nccl in all", "peer in all")
_WARM, _REPEATS = 2, 12
_AHEAD = 20_000_000
"""Cycles for which the device waits while the host enqueues."""


def prompt_rows(parallel: Parallel, counts: Sequence[int], widths: Sequence[int], dtype: torch.dtype,
                link: float) -> list[dict[str, Any]]:
    """Microseconds of the parts of an exchange; ``link`` bytes a microsecond."""
    return [Layer(parallel, count, width, dtype).measured(link) for width in widths for count in counts]


class Layer:
    """A rank's rows ahead of its experts, and what they have made."""

    def __init__(self, parallel: Parallel, rows: int, width: int, dtype: torch.dtype):
        self._group, self._rows, device = parallel.dp, rows, parallel.device
        ranks = self._group.size
        self._places = EXPERTS // ranks
        generator = torch.Generator(device).manual_seed(self._group.rank)
        self.x = torch.randn(rows, width, device=device, generator=generator).to(dtype)
        self.numbers = torch.rand(rows, EXPERTS, device=device, generator=generator).topk(CHOICES).indices
        self.weights = torch.rand(rows, CHOICES, device=device, generator=generator)
        self.every = torch.empty(ranks * rows, width, device=device, dtype=dtype)
        self.residual, self.weight = torch.randn_like(self.x), torch.ones(width, device=device, dtype=dtype)
        wanted = (self.numbers // self._places == torch.arange(ranks, device=device)[:, None, None]).any(-1)
        self.index, self.sent = wanted.nonzero()[:, 1], wanted.sum(1).tolist()
        self.taken = parallel.dp.gather_ints(wanted.sum(1).cpu().numpy())[:, self._group.rank].tolist()

    def measured(self, link: float) -> dict[str, Any]:
        group, x = self._group, self.x
        elsewhere = sum(self.sent) - self.sent[group.rank]
        row: dict[str, Any] = {"rows": float(self._rows), "hidden": float(x.shape[1]), "kind": "prompts",
                               "link": elsewhere * x.shape[1] * x.element_size() / link}
        for float8 in (True, False):
            row |= self._by_peers(float8)
        picked, back = x[self.index], torch.empty(sum(self.taken), x.shape[1], device=x.device, dtype=x.dtype)
        row |= timed(group.barrier, {
            "gather": lambda: group.all_gather_rows(x),
            "scatter": lambda: group.reduce_scatter_rows(self.every),
            "norm": lambda: rmsnorm(x, self.weight, 1e-5, self.residual),
            "there": lambda: dist.all_to_all_single(back, x[self.index], self.taken, self.sent,
                                                    group=group.device_group),
            "back": lambda: dist.all_to_all_single(picked, back, self.sent, self.taken, group=group.device_group)})
        row["nccl in all"] = sum(row[name] for name in ("gather", "sum", "scatter", "norm"))
        row["peer in all"] = sum(row[name] for name in ("dispatch", "combine", "parts"))
        return row

    def _by_peers(self, float8: bool) -> dict[str, float]:
        assert self._group.device_group is not None
        layout = DispatchLayout(self._group.size, self._rows, self.x.shape[1], CHOICES, float8, self.x.dtype)
        shared = DispatchBuffers(self._group.rank, self._group.device_group, self._group.device, layout)
        peers, n = shared.peers, self._rows
        ids, weights = peers.choices(n)
        self._dispatch(peers)
        here = ids.flatten() >= 0
        made = torch.randn(int(here.sum()), self.x.shape[1], device=self.x.device, dtype=self.x.dtype)
        positions = torch.zeros(len(here), dtype=torch.int32, device=self.x.device)
        positions[here] = torch.randperm(len(made), device=self.x.device).int()
        self._combine(peers, made, positions)
        found = timed(self._group.barrier, {"dispatch": lambda: self._dispatch(peers),
                                            "combine": lambda: self._combine(peers, made, positions)})
        if float8:
            return {"dispatch float8": found["dispatch"]}
        return found | timed(self._group.barrier, {
            "sum": lambda: moe_sum(made, ids, self._places, weights, positions, self.every),
            "parts": lambda: reduce_combined(self.numbers, self._places, peers, None, self.residual, self.weight,
                                             1e-5)})

    def _dispatch(self, peers: DispatchMemory) -> None:
        all_to_all_dispatch(self.x, self.numbers, self.weights, self._rows, self._places, peers)

    def _combine(self, peers: DispatchMemory, made: torch.Tensor, positions: torch.Tensor) -> None:
        all_to_all_combine(made, positions, self._rows, self._places, peers)


def timed(barrier: Callable[[], None], works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each of ``works``, which follow one another; the host is ahead of the device."""
    for work in works.values():
        work()
    torch.cuda.synchronize()
    barrier()
    torch.cuda._sleep(_AHEAD)
    runs = []
    for _ in range(_WARM + _REPEATS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        marks[0].record()
        for work, mark in zip(works.values(), marks[1:]):
            work()
            mark.record()
        runs.append(marks)
    torch.cuda.synchronize()
    return {name: statistics.median(marks[i].elapsed_time(marks[i + 1]) * 1e3 for marks in runs[_WARM:])
            for i, name in enumerate(works)}
