"""The exchange of steps whose tokens go to the ranks of their experts alone, through each other's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...kernels._triton import AVAILABLE
from ...kernels.arguments import Float8Rows
from ...kernels.comm.all_to_all import all_to_all_combine, all_to_all_dispatch, reduce_combined
from ...kernels.comm.dispatch_buffers import GROUP, DispatchLayout, DispatchMemory
from .dispatch_buffers import DispatchBuffers
from .tp import TPGroup

log = logging.getLogger("baton.engine")

Products = Callable[[torch.Tensor | Float8Rows, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""``(rows [N, hidden], places [N, K])`` to what this rank's experts make of them, and where each choice's row is."""
_TRIAL_PATIENCE = 1 << 23  # looks for a peer's rows, some 10 s: another rank may still compile the kernel


class AllToAllExchange:
    """Of ranks that are an attention group each, with whole experts. TokenExchange says what a step has; ``takes`` says
    whether it goes this way, by what is equal on all ranks. ``nbytes``: of this GPU's memory, once connected."""

    def __init__(self, group: TPGroup):
        self._group = group
        self._most = 0
        self._shared: DispatchBuffers | None = None

    def connect(self, rows: int, width: int, choices: int, dtype: torch.dtype, *, float8: bool = False) -> None:
        """Memory for ``rows`` of each rank, of ``width`` values, with as many ``choices`` each, which travel in
        ``float8`` where it is said. A collective of the group; a sentence in the log tells where its GPUs cannot."""
        made, trouble = None, None
        if self._group.device.type != "cuda":
            return
        try:
            if not AVAILABLE or self._group.device_group is None:
                raise RuntimeError("it takes triton and NCCL")
            layout = DispatchLayout(self._group.size, rows, width, choices, float8, dtype)
            made = DispatchBuffers(self._group.rank, self._group.device_group, self._group.device, layout)
        except Exception as error:  # the API is young, and what it raises depends on drivers and container rights
            trouble = f"{type(error).__name__}: {error}"
        if self._group.all_true(made is not None):
            assert made is not None
            trouble = _tried(made.peers)
            if self._group.all_true(trouble is None):
                self._shared = made
                return
        log.warning("Tokens reach experts by collectives, for which the host waits in every layer: %s.",
                    trouble or "another rank has no memory that its peers see")

    @property
    def nbytes(self) -> int:
        return 0 if self._shared is None else self._shared.peers.layout.nbytes

    @property
    def connected(self) -> bool:
        return self._shared is not None

    def begin(self, counts: Sequence[int]) -> None:
        """A step of so many rows of each rank."""
        self._most = max(counts)

    @property
    def takes(self) -> bool:
        return self.fits(self._most)

    def fits(self, rows: int) -> bool:
        """Whether a step of so many rows of each rank at most can go this way."""
        return self._shared is not None and 0 < rows <= self._shared.peers.layout.rows

    def computed(self, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, places: int, products: Products,
                 more: torch.Tensor | None = None) -> DeferredCombine:
        """What the ranks' experts make of this rank's tokens ``x`` [T, hidden], in a step that ``takes`` took, and
        ``more``; see ``compute_by_all_to_all``. All ranks call it together."""
        assert self._shared is not None
        peers, most = self._shared.peers, self._most
        numbers = numbers.contiguous()
        all_to_all_dispatch(x.contiguous(), numbers, weights.contiguous(), most, places, peers)
        made, positions = products(peers.tokens(most), peers.choices(most)[0])
        all_to_all_combine(made, positions, most, places, peers)
        return DeferredCombine(numbers, places, peers, more)


@dataclass(frozen=True)
class DeferredCombine:
    """The sum [T, hidden] of what the ranks of their experts have made of this rank's tokens, and of ``more``. It is
    made before the next exchange, which overwrites the parts; else as DeferredSum."""

    numbers: torch.Tensor
    places: int
    peers: DispatchMemory
    more: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """``[T, hidden]``"""
        return reduce_combined(self.numbers, self.places, self.peers, self.more)[0]

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.total()[index]

    norms = True

    def normed(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(total + residual) * weight, total + residual)``"""
        total, y = reduce_combined(self.numbers, self.places, self.peers, self.more, residual, weight, eps)
        assert y is not None
        return y, total


def _tried(peers: DispatchMemory) -> str | None:
    """Exchange a few rows twice, of which every choice adds the row itself; what is wrong. A collective of the ranks.

    A rank that waits in vain gives up, so that this ends whatever is wrong.
    """
    layout, device = peers.layout, peers.own.device
    try:
        rows = min(3, layout.rows)
        x = torch.randn(rows, layout.width, device=device).to(layout.dtype)
        numbers = (torch.arange(layout.choices, device=device) % layout.ranks).expand(rows, -1).contiguous()
        weights = torch.ones(rows, layout.choices, device=device)
        back = torch.arange(layout.ranks * rows * layout.choices, dtype=torch.int32, device=device)
        for positions in (None, back):  # which are two kernels
            all_to_all_dispatch(x, numbers, weights, rows, 1, peers, max_polls=_TRIAL_PATIENCE)
            came = peers.tokens(rows)
            if isinstance(came, Float8Rows):
                came = came.values.float() * came.scale.repeat_interleave(GROUP, 1)[:, :layout.width]
            made = came.to(layout.dtype).repeat_interleave(layout.choices, 0)
            all_to_all_combine(made, positions, rows, 1, peers, max_polls=_TRIAL_PATIENCE)
            total = reduce_combined(numbers, 1, peers)[0].float() / layout.choices
            if not torch.allclose(total, x.float(), atol=0.1, rtol=0.1):
                return "rows came back wrong"
    except Exception as error:  # whatever a compiler does on a machine that nobody has seen
        return f"{type(error).__name__}: {error}"
    return None
