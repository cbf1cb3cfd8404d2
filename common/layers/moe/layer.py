"""A mixture of experts in the place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ....kernels.arguments import Float8Format
from ...config.moe import MoESpec
from ...distributed.deferred_reduce import DeferredSum, Summed
from ...distributed.expert_share import ExpertShare
from ...distributed.low_latency import GatheredTokens
from ...distributed.tp import TPGroup
from ...weights.slots import Allocate, Slot
from .dispatch import compute_by_all_to_all
from .eplb_algorithm import balanced, first_placement
from .experts import Experts
from .placement import Placement
from .routing import Router
from .shared import SharedExpert
from .weight_transfer import move_experts


class MoE:
    """``[T, hidden] -> [T, hidden]``: router, this rank's experts, and the expert that all tokens share.

    Names in the checkpoint: ``{name}.{spec.router_name}.weight``, ``{name}.experts.{e}.gate_proj.weight``,
    ``{name}.{spec.shared_name}.gate_proj.weight``, ...
    """

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, share: ExpertShare, allocate: Allocate):
        self.share = share
        self.own_tokens = share.own_tokens
        self.router = Router(f"{name}.{spec.router_name}", spec, hidden_size, allocate)
        self.experts = Experts(f"{name}.experts", spec, hidden_size, share, allocate)
        device = allocate.device
        self.counts = torch.zeros(spec.num_experts, dtype=torch.int64, device=device) if share.counted else None
        self.placement: Placement | None = None
        if share.movable:
            first = first_placement(spec.num_experts, share.ep_size, self.experts.places)
            self.placement = Placement(first, spec.num_experts, device)
            self.experts.residents = first[share.ep_rank].tolist()
        self.shared: SharedExpert | None = None
        if spec.shared_size:
            # Where tokens are spread over the ranks, no other rank would add its part to this one's tokens.
            tp = TPGroup() if share.spreads else share.group
            self.shared = SharedExpert(f"{name}.{spec.shared_name}", spec, hidden_size, tp, allocate)

    def form(self, rows: int) -> Float8Format | None:
        """See LinearMethod: None, for the router looks at the rows too."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are the same on every rank of the group, or with ``own_tokens`` each rank's own."""
        if self.own_tokens:
            return self.spread(x)
        if self.share.spreads:
            return self._own_rows_gathered(x)
        return self.share.group.all_reduce(self.partial(x))

    def pending(self, x: torch.Tensor | GatheredTokens) -> Summed:
        """The same, its sum left to the norm that follows where there is one to make."""
        if isinstance(x, GatheredTokens):
            return self._met(x.rows)
        if self.own_tokens:
            return self._sent(x)
        if self.sums and self.share.group.size > 1:
            return DeferredSum(self.partial(x), self.share.group)
        return self(x)

    @property
    def sums(self) -> bool:
        """Whether there is a ``partial``."""
        return not self.share.spreads

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, to be added to the other ranks'; only without an all-to-all."""
        y, shared = self.summands(x)
        if shared is not None:
            y += shared
        return y

    def summands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``partial`` as its experts' part and that of the shared expert."""
        assert self.sums
        return self._by_experts(x), None if self.shared is None else self.shared.partial(x)

    def _by_experts(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's experts add to all ranks' tokens ``x``."""
        first = self.share.ep_rank * self.experts.places
        if self.counts is None and self.placement is None:
            places, weights = self.router(x, self.share.live, first)
        else:
            ids, weights = self.router(x)
            meeting = self.share.meeting
            numbers = self._numbers(ids, counted=meeting.own(ids) if meeting and self.share.spreads else ids)
            places = numbers - first if first else numbers
        return self.experts(x, places, weights)

    def _met(self, rows: torch.Tensor) -> Summed:
        """Of a decode step, whose rows all ranks have; what the tokens share each computes for its own."""
        meeting = self.share.meeting
        assert meeting is not None and self.own_tokens
        y = self._by_experts(rows)
        if self.shared is not None:
            meeting.own(y).add_(self.shared.partial(meeting.own(rows)))
        return meeting.parted(y)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, hidden] are this rank's own tokens, as many as it has (0 too); so is the result. Where tokens are
        spread only; all ranks of the group call it together."""
        made = self._sent(x)
        return made if isinstance(made, torch.Tensor) else made.total()

    def _sent(self, x: torch.Tensor) -> Summed:
        assert self.share.spreads
        ids, weights = self.router(x, self._own_live(len(x)))
        numbers = self._numbers(ids, counted=ids, shift=self.share.group.rank)
        more = None if self.shared is None else self.shared.partial(x)
        places, sent = self.experts.places, self.share.sent
        if sent is not None and sent.takes:
            return sent.computed(x, numbers, weights, places, self.experts.products, more)
        y = compute_by_all_to_all(self.share.group, x, numbers, weights, places, self.experts)
        return y if more is None else y + more

    def _own_live(self, rows: int) -> torch.Tensor | None:
        """Which of this rank's rows of the step are tokens; None: all."""
        live, size = self.share.live, self.share.group.size
        # Placements know of no negative ids: what pads is then computed as a token.
        if live is None or self.placement is not None or not self.own_tokens or len(live) != rows * size:
            return None
        return live[self.share.group.rank * rows:(self.share.group.rank + 1) * rows]

    def _own_rows_gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank computes an equal part of the rows, padded; then all have all."""
        group = self.share.group
        each = -(-x.shape[0] // group.size)
        mine = self.spread(x[group.rank * each:(group.rank + 1) * each])
        padded = torch.nn.functional.pad(mine, (0, 0, 0, each - mine.shape[0]))
        parts = group.all_gather_last_dim(padded.flatten()).view(group.size * each, x.shape[1])
        return parts[:x.shape[0]]

    def _numbers(self, ids: torch.Tensor, *, counted: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """Places, numbered over all ranks, of experts that are computed now, of which this rank counts ``counted``."""
        if self.counts is not None:
            self.counts.scatter_add_(0, counted.flatten(), torch.ones_like(counted).flatten())
        return ids if self.placement is None else self.placement.numbers_of(ids, shift=shift)

    def rebalance(self, load: np.ndarray) -> int:
        """Move experts to where tokens as of late (``load`` [num_experts], equal on all ranks) make the ranks work
        alike. All ranks call it between two steps. Returns how many experts came to this rank."""
        assert self.placement is not None
        before = self.placement.residents
        after = balanced(load, before)
        moved = move_experts(self.share.group, before, after, self.experts.stacks)
        self.placement.move(after)
        self.experts.residents = after[self.share.ep_rank].tolist()
        return moved

    def slots(self) -> Iterator[Slot]:
        yield from self.router.slots()
        yield from self.experts.slots()
        if self.shared is not None:
            yield from self.shared.slots()
