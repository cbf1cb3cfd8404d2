"""One rank's experts: their weights, stacked, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....kernels.moe_experts import moe_experts
from ...config.moe import MoESpec
from ...distributed.expert_share import ExpertShare
from ...weights.slots import Allocate, Slot


class Experts:
    """``gate_up`` [S, 2 * I, hidden] and ``down`` [S, hidden, I]: the experts of this rank's S places, of each the
    I intermediate values that are its own. Place p holds expert ``residents[p]``.

    In the checkpoint every expert has three matrices; see ``weights.expert_names`` for other forms.
    """

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, share: ExpertShare, allocate: Allocate):
        self.name = name
        self.spec = spec
        self.share = share
        self.places = spec.num_experts // share.ep_size
        self.residents = list(range(share.ep_rank * self.places, (share.ep_rank + 1) * self.places))
        size = spec.intermediate_size // share.split
        self.gate_up = allocate(self.places, 2 * size, hidden_size)
        self.down = allocate(self.places, hidden_size, size)

    def __call__(self, x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``[T, hidden]``, to be added to the other ranks' parts.

        ``places`` [T, K] int64 are places of this rank; one outside of ``[0, S)`` belongs to another rank and adds
        nothing. ``weights`` [T, K] float32.
        """
        return moe_experts(x, self.gate_up, self.down, places, weights)

    def slots(self) -> Iterator[Slot]:
        here = {expert: place for place, expert in enumerate(self.residents)}
        size, full = self.down.shape[2], self.spec.intermediate_size
        start, hidden = self.share.split_rank * size, self.down.shape[1]
        for expert in range(self.spec.num_experts):
            place = here.get(expert)
            gate_up = self.gate_up[:0].flatten(0, 1) if place is None else self.gate_up[place]
            down = self.down[0, :0] if place is None else self.down[place]
            name = f"{self.name}.{expert}"
            yield Slot(f"{name}.gate_proj.weight", gate_up[:size], (full, hidden), 0, start)
            yield Slot(f"{name}.up_proj.weight", gate_up[size:], (full, hidden), 0, start)
            yield Slot(f"{name}.down_proj.weight", down, (hidden, full), 1, start)
