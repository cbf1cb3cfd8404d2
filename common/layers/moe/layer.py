"""A mixture of experts in the place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...config.moe import MoESpec
from ...distributed.expert_share import ExpertShare
from ...distributed.tp import TPGroup
from ...weights.slots import Allocate, Slot
from .dispatch import compute_by_all_to_all
from .experts import Experts
from .routing import Router
from .shared import SharedExpert


class MoE:
    """``[T, hidden] -> [T, hidden]``: router, this rank's experts, and the expert that all tokens share.

    Names in the checkpoint: ``{name}.gate.weight``, ``{name}.experts.{e}.gate_proj.weight``,
    ``{name}.{spec.shared_name}.gate_proj.weight``, ...
    """

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, share: ExpertShare, allocate: Allocate):
        self.share = share
        self.own_tokens = share.own_tokens
        self.router = Router(f"{name}.gate", spec, hidden_size, allocate)
        self.experts = Experts(f"{name}.experts", spec, hidden_size, share, allocate)
        self.shared: SharedExpert | None = None
        if spec.shared_size:
            # Where tokens are spread over the ranks, no other rank would add its part to this one's tokens.
            tp = TPGroup() if share.a2a == "alltoall" else share.group
            self.shared = SharedExpert(f"{name}.{spec.shared_name}", spec, hidden_size, tp, allocate)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are the same on every rank of the group, or with ``own_tokens`` each rank's own."""
        if self.own_tokens:
            return self.spread(x)
        if self.share.a2a == "alltoall":
            return self._own_rows_gathered(x)
        ids, weights = self.router(x)
        y = self.experts(x, ids - self.share.ep_rank * self.experts.places, weights)
        if self.shared is not None:
            y += self.shared.partial(x)
        return self.share.group.all_reduce(y)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, hidden] are this rank's own tokens, as many as it has (0 too); so is the result. For ``alltoall``
        only; all ranks of the group call it together."""
        assert self.share.a2a == "alltoall"
        ids, weights = self.router(x)
        y = compute_by_all_to_all(self.share.group, x, ids, weights, self.experts.places, self.experts)
        return y if self.shared is None else y + self.shared.partial(x)

    def _own_rows_gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank computes an equal part of the rows, padded; then all have all."""
        group = self.share.group
        each = -(-x.shape[0] // group.size)
        mine = self.spread(x[group.rank * each:(group.rank + 1) * each])
        padded = torch.nn.functional.pad(mine, (0, 0, 0, each - mine.shape[0]))
        parts = group.all_gather_last_dim(padded.flatten()).view(group.size * each, x.shape[1])
        return parts[:x.shape[0]]

    def slots(self) -> Iterator[Slot]:
        yield from self.router.slots()
        yield from self.experts.slots()
        if self.shared is not None:
            yield from self.shared.slots()
