"""The MoE layer: a mixture of experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ....kernels.arguments import Float8Format
from ...config.moe import MoESpec
from ...distributed.deferred_reduce import DeferredSum, MaybeDeferred
from ...distributed.expert_parallel import ExpertParallel
from ...distributed.low_latency import GatheredTokens
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...distributed.tp import TPGroup
from ...weights.slots import Allocate, Slot
from .dispatch import compute_by_all_to_all
from .eplb_algorithm import initial_placement, rebalance
from .experts import Experts
from .placement import Placement
from .routing import Router
from .shared import SharedExpert
from .weight_transfer import move_experts


class MoE:
    """MoE layer ``[T, hidden] -> [T, hidden]``: router, this rank's experts, and the shared expert.

    Names in the checkpoint: ``{name}.{spec.router_name}.weight``, ``{name}.experts.{e}.gate_proj.weight``,
    ``{name}.{spec.shared_name}.gate_proj.weight``, ...
    """

    computes_own_rows = False

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, share: ExpertParallel, allocate: Allocate):
        self.share = share
        self._spec = spec
        self.dispatches_tokens = share.dispatches_tokens
        self.router = Router(f"{name}.{spec.router_name}", spec, hidden_size, allocate)
        self.experts = Experts(f"{name}.experts", spec, hidden_size, share, allocate)
        device = allocate.device
        self.counts = (torch.zeros(spec.num_experts, dtype=torch.int64, device=device)
                       if share.counts_tokens else None)
        self.physical_counts: torch.Tensor | None = None
        """[physical experts] int64, where they are counted too: tokens as in ``counts``."""
        self.keeps_chosen = False
        self.chosen: torch.Tensor | None = None
        """The physical experts [T, top_k] of the last step, where it ``keeps_chosen``."""
        self.chosen_rows: torch.Tensor | None = None
        """int32 [rows, top_k], to which the experts of the last step's tokens are written, where they are asked for."""
        self.placement: Placement | None = None
        if share.eplb:
            initial = initial_placement(spec.num_experts, share.ep_size, self.experts.num_local)
            self.placement = Placement(initial, spec.num_experts, device, share.ep_rank)
            self.experts.physical_to_logical = initial[share.ep_rank].tolist()
        self.shared: SharedExpert | None = None
        if spec.shared_size:
            # Where each rank has its own tokens, no other rank would add its part of the shared expert's result.
            tp = TPGroup() if share.uses_all_to_all else share.group
            self.shared = SharedExpert(f"{name}.{spec.shared_name}", spec, hidden_size, tp, allocate)

    def activation_format(self, rows: int) -> Float8Format | None:
        """Returns None: the router reads the rows, too."""
        return None

    def __call__(self, x: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        """Computes the layer in a step of ``rows``. ``x`` and the result are the same on every rank of the group, or
        with ``dispatches_tokens`` each rank's own."""
        if self.dispatches_tokens:
            return self.forward_all_to_all(x, rows)
        if self.share.uses_all_to_all:
            return self._split_rows(x, rows)
        return self.share.group.all_reduce(self.partial(x, rows))

    def forward_deferred(self, x: torch.Tensor | GatheredTokens, rows: StepRows = ONE_GROUP) -> MaybeDeferred:
        """Computes the layer, with its sum over the ranks deferred where there is one."""
        if isinstance(x, GatheredTokens):
            return self._forward_low_latency(x.rows, rows)
        if self.dispatches_tokens:
            return self._dispatch(x, rows)
        if self.has_partial and self.share.group.size > 1:
            return DeferredSum(self.partial(x, rows), self.share.group)
        return self(x, rows)

    @property
    def has_partial(self) -> bool:
        return not self.share.uses_all_to_all

    def partial(self, x: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        """Returns this rank's summand of the result; needs ``has_partial``."""
        y, shared = self.partial_pair(x, rows)
        if shared is not None:
            y += shared
        return y

    def partial_pair(self, x: torch.Tensor,
                     rows: StepRows = ONE_GROUP) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``partial`` as the routed experts' summand and that of the shared expert."""
        assert self.has_partial
        return self._routed_experts(x, rows), None if self.shared is None else self.shared.partial(x)

    def _routed_experts(self, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Returns this rank's experts' summand for all ranks' tokens ``x``."""
        first_id = self.share.ep_rank * self.experts.num_local
        if self.counts is None and self.placement is None and self.share.dispatch != "fake":
            local_ids, weights = self.router(x, rows.live, first_id)
        else:
            ids, weights = self.router(x)
            exchange = self.share.low_latency
            if self.share.dispatch == "fake":
                ids = self._fake_ids(ids)
            physical_ids = self._physical_ids(ids)
            if exchange and self.share.uses_all_to_all:
                self._count(exchange.local_rows(ids), exchange.local_rows(physical_ids))
            else:
                self._count(ids, physical_ids)
            local_ids = physical_ids - first_id if first_id else physical_ids
        return self.experts(*self._weighed(x, local_ids, weights))

    def _weighed(self, x: torch.Tensor, ids: torch.Tensor,
                 weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the experts' arguments, with the weights of their inputs applied where it is those that have some."""
        if not self._spec.weighs_inputs:
            return x, ids, weights
        return (x * weights).to(x.dtype), ids, torch.ones_like(weights)

    def _forward_low_latency(self, x: torch.Tensor, rows: StepRows) -> MaybeDeferred:
        """Computes a decode step, whose tokens ``x`` all ranks have; the shared expert computes each rank's own."""
        exchange = self.share.low_latency
        assert exchange is not None and self.dispatches_tokens
        y = self._routed_experts(x, rows)
        if self.shared is not None:
            exchange.local_rows(y).add_(self.shared.partial(exchange.local_rows(x)))
        return exchange.reduce_scatter_deferred(y)

    def forward_all_to_all(self, x: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        """Computes this rank's own tokens ``x`` [T, hidden], of which there may be none. Needs
        ``share.uses_all_to_all``; all ranks of the group call it together."""
        y = self._dispatch(x, rows)
        return y if isinstance(y, torch.Tensor) else y.reduce()

    def _dispatch(self, x: torch.Tensor, rows: StepRows) -> MaybeDeferred:
        assert self.share.uses_all_to_all
        ids, weights = self.router(x, self._local_live(len(x), rows))
        if self.share.dispatch == "fake":
            ids = self._fake_ids(ids)
        physical_ids = self._physical_ids(ids, shift=self.share.group.rank, own=self.share.dispatch == "static")
        self._count(ids, physical_ids)
        addend = None if self.shared is None else self.shared.partial(x)
        x, physical_ids, weights = self._weighed(x, physical_ids, weights)
        num_local, all_to_all = self.experts.num_local, self.share.all_to_all
        if all_to_all is not None and all_to_all.can_dispatch(rows):
            return all_to_all.dispatch_combine(x, physical_ids, weights, num_local, self.experts.products, addend,
                                               rows)
        y = compute_by_all_to_all(self.share.group, x, physical_ids, weights, num_local, self.experts)
        return y if addend is None else y + addend

    def _local_live(self, own: int, rows: StepRows) -> torch.Tensor | None:
        """Returns which of this rank's rows of the step are tokens; None: all."""
        live, size = rows.live, self.share.group.size
        # Placements do not map negative ids: padding is then computed as tokens are.
        if live is None or self.placement is not None or not self.dispatches_tokens or len(live) != own * size:
            return None
        return live[self.share.group.rank * own:(self.share.group.rank + 1) * own]

    def _split_rows(self, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Computes an equal part of the rows, padded, on each rank; then gathers them."""
        group = self.share.group
        each = -(-x.shape[0] // group.size)
        mine = self.forward_all_to_all(x[group.rank * each:(group.rank + 1) * each], rows)
        padded = torch.nn.functional.pad(mine, (0, 0, 0, each - mine.shape[0]))
        parts = group.all_gather_last_dim(padded.flatten()).view(group.size * each, x.shape[1])
        return parts[:x.shape[0]]

    def _fake_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns experts in turn, in place of ``ids`` [T, K]; those of rows without a token stay negative."""
        turns = torch.arange(ids.numel(), device=ids.device, dtype=ids.dtype).view_as(ids) % self._spec.num_experts
        return torch.where(ids < 0, ids, turns)

    def _physical_ids(self, ids: torch.Tensor, *, shift: int = 0, own: bool = False) -> torch.Tensor:
        """Maps expert ids to physical ones. ``own``: each expert's is always the same."""
        if self.placement is None:
            return ids
        return self.placement.to_own(ids) if own else self.placement.to_physical(ids, shift=shift)

    def _count(self, ids: torch.Tensor, physical_ids: torch.Tensor) -> None:
        """Counts tokens, this rank's part of them, where they are counted."""
        if self.counts is None:
            return
        if self.keeps_chosen:
            self.chosen = physical_ids
        if self.chosen_rows is not None:
            count = min(len(ids), len(self.chosen_rows))
            self.chosen_rows[:count].copy_(ids[:count])
        for counts, chosen in ((self.counts, ids), (self.physical_counts, physical_ids)):
            if counts is not None:
                counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())

    def rebalance(self, load: np.ndarray) -> int:
        """Moves experts so that recent tokens (``load`` [steps, num_experts], equal on all ranks) would load the ranks
        evenly. All ranks call it between two steps. Returns how many experts this rank got from others."""
        assert self.placement is not None
        return self.place(rebalance(load, self.placement.physical_to_logical, self.share.num_nodes,
                                    self._spec.num_groups))

    def place(self, after: np.ndarray) -> int:
        """Moves experts to the placement ``after`` [ranks, experts of a rank], equal on all ranks; as ``rebalance``.
        """
        assert self.placement is not None
        before = self.placement.physical_to_logical
        moved = move_experts(self.share.group, before, after, self.experts.stacks)
        self.placement.update(after)
        self.experts.physical_to_logical = after[self.share.ep_rank].tolist()
        return moved

    def slots(self) -> Iterator[Slot]:
        yield from self.router.slots()
        yield from self.experts.slots()
        if self.shared is not None:
            yield from self.shared.slots()
