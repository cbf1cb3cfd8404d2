"""All-to-all dispatch and combine: tokens are sent to the ranks of their experts only, through symmetric memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...kernels._triton import AVAILABLE
from ...kernels.arguments import Float8Rows
from ...kernels.comm.all_to_all import all_to_all_combine, all_to_all_dispatch, reduce_combined
from ...kernels.comm.dispatch_buffers import GROUP, DispatchLayout, DispatchMemory
from .dispatch_buffers import DispatchBuffers
from .step_rows import StepRows
from .tp import TPGroup

log = logging.getLogger("baton.engine")

Products = Callable[[torch.Tensor | Float8Rows, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Takes ``(rows [N, hidden], local expert ids [N, K])``; returns the rows that this rank's experts compute, and the
position of each choice's row among them."""
_SELF_TEST_MAX_POLLS = 1 << 23
"""Polls for a peer's rows, some 10 s: another rank may still compile the kernel."""


class AllToAllExchange:
    """All-to-all between attention groups of one rank each, with whole experts. ``can_dispatch`` says whether a
    step takes this path, by what is equal on all ranks. ``nbytes``: this GPU's memory that it occupies, once
    connected."""

    def __init__(self, group: TPGroup):
        self._group = group
        self._shared: DispatchBuffers | None = None

    def connect(self, rows: int, width: int, choices: int, dtype: torch.dtype, *, float8: bool = False) -> None:
        """Allocates symmetric memory for ``rows`` of each rank, of ``width`` values with ``choices`` experts each, sent
        in ``float8`` or ``dtype``. A collective of the group; logs a warning where its GPUs cannot."""
        shared, failure = None, None
        if self._group.device.type != "cuda":
            return
        try:
            if not AVAILABLE or self._group.device_group is None:
                raise RuntimeError("it takes triton and NCCL")
            areas = DispatchLayout(self._group.size, rows, width, choices, float8, dtype)
            shared = DispatchBuffers(self._group.rank, self._group.device_group, self._group.device, areas)
        except Exception as error:  # the API is young, and what it raises depends on drivers and container rights
            failure = f"{type(error).__name__}: {error}"
        if self._group.all_true(shared is not None):
            assert shared is not None
            failure = _self_test(shared.peers)
            if self._group.all_true(failure is None):
                self._shared = shared
                return
        log.warning("Tokens reach experts by collectives, for which the host waits in every layer: %s.",
                    failure or "another rank has no memory that its peers see")

    @property
    def nbytes(self) -> int:
        return 0 if self._shared is None else self._shared.peers.layout.nbytes

    @property
    def connected(self) -> bool:
        return self._shared is not None

    def can_dispatch(self, rows: StepRows) -> bool:
        """Returns whether the step takes this path."""
        return self.fits(rows.largest)

    def fits(self, rows: int) -> bool:
        """Returns whether a step of at most ``rows`` rows of each rank can take this path."""
        return self._shared is not None and 0 < rows <= self._shared.peers.layout.rows

    def dispatch_combine(self, x: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor, num_local: int,
                         products: Products, addend: torch.Tensor | None, rows: StepRows) -> DeferredCombine:
        """Returns the weighted sum of the experts' results for this rank's tokens ``x`` [T, hidden], plus ``addend``,
        in a step of ``rows`` that ``can_dispatch``. All ranks call it together; see ``compute_by_all_to_all``."""
        assert self._shared is not None
        peers, max_rows = self._shared.peers, rows.largest
        physical_ids = physical_ids.contiguous()
        all_to_all_dispatch(x.contiguous(), physical_ids, weights.contiguous(), max_rows, num_local, peers)
        y, positions = products(peers.tokens(max_rows), peers.choices(max_rows)[0])
        all_to_all_combine(y, positions, max_rows, num_local, peers)
        return DeferredCombine(physical_ids, num_local, peers, addend)


@dataclass(frozen=True)
class DeferredCombine:
    """A deferred combine: the sum [T, hidden] of the experts' results for this rank's tokens, and of ``addend``. It
    must be computed before the next exchange, which overwrites the results. See DeferredSum."""

    physical_ids: torch.Tensor
    num_local: int
    peers: DispatchMemory
    addend: torch.Tensor | None = None

    def reduce(self) -> torch.Tensor:
        """Returns the sum ``[T, hidden]``."""
        return reduce_combined(self.physical_ids, self.num_local, self.peers, self.addend)[0]

    def select(self, index: torch.Tensor) -> torch.Tensor:
        return self.reduce()[index]

    fuses_norm = True

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(sum + residual) * weight, sum + residual)``."""
        total, y = reduce_combined(self.physical_ids, self.num_local, self.peers, self.addend, residual, weight, eps)
        assert y is not None
        return y, total


def _self_test(peers: DispatchMemory) -> str | None:
    """Exchanges a few rows twice, with experts that return the row itself; returns what is wrong, or None. A
    collective.

    A rank that waits in vain gives up, so that this ends whatever is wrong.
    """
    areas, device = peers.layout, peers.own.device
    try:
        rows = min(3, areas.rows)
        x = torch.randn(rows, areas.width, device=device).to(areas.dtype)
        physical_ids = (torch.arange(areas.choices, device=device) % areas.ranks).expand(rows, -1).contiguous()
        weights = torch.ones(rows, areas.choices, device=device)
        back = torch.arange(areas.ranks * rows * areas.choices, dtype=torch.int32, device=device)
        for positions in (None, back):  # which are two kernels
            all_to_all_dispatch(x, physical_ids, weights, rows, 1, peers, max_polls=_SELF_TEST_MAX_POLLS)
            received = peers.tokens(rows)
            if isinstance(received, Float8Rows):
                received = received.values.float() * received.scale.repeat_interleave(GROUP, 1)[:, :areas.width]
            y = received.to(areas.dtype).repeat_interleave(areas.choices, 0)
            all_to_all_combine(y, positions, rows, 1, peers, max_polls=_SELF_TEST_MAX_POLLS)
            total = reduce_combined(physical_ids, 1, peers)[0].float() / areas.choices
            if not torch.allclose(total, x.float(), atol=0.1, rtol=0.1):
                return "rows came back wrong"
    except Exception as error:  # whatever a compiler does on an unknown machine
        return f"{type(error).__name__}: {error}"
    return None
