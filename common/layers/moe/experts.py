"""One rank's experts: their weights, stacked, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....kernels.arguments import ExpertBiases, Float8Rows, Scales
from ....kernels.moe.moe_experts import moe_experts, moe_products
from ...config.moe import MoESpec
from ...distributed.expert_share import ExpertShare
from ...quantization.shards import Shard
from ...weights.slots import Allocate, Slot
from .stack import ExpertLinear


class Experts:
    """Of each expert in one of this rank's S places, the I intermediate values that are its own. Place p holds expert
    ``residents[p]``.

    In the checkpoint every expert has three matrices; see ``weights.expert_names`` for other forms.
    """

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, share: ExpertShare, allocate: Allocate):
        self.spec = spec
        self._group = share.group
        self.hidden_size, self.dtype = hidden_size, allocate.own
        self.places = share.places(spec)
        self.residents = list(range(share.ep_rank * self.places, (share.ep_rank + 1) * self.places))
        full, size = spec.intermediate_size, spec.intermediate_size // share.split
        start = share.split_rank * size

        def gate_up(expert: int) -> list[Shard]:
            return [Shard(f"{name}.{expert}.{part}_proj", index * size, size, (full, hidden_size), 0, start)
                    for index, part in enumerate(("gate", "up"))]

        def down(expert: int) -> list[Shard]:
            return [Shard(f"{name}.{expert}.down_proj", 0, hidden_size, (hidden_size, full), 1, start)]

        self.gate_up = ExpertLinear(self.places, hidden_size, gate_up, allocate, bias=spec.expert_bias)
        # Of the ranks whose results add up to an expert's, the first adds its bias.
        self.down = ExpertLinear(self.places, size, down, allocate, bias=spec.expert_bias,
                                 adds_bias=share.split_rank == 0)

    def __call__(self, x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``[T, hidden]``, to be added to the other ranks' parts.

        ``places`` [T, K] int64 are places of this rank; one outside of ``[0, S)`` belongs to another rank and adds
        nothing. ``weights`` [T, K] float32.
        """
        return moe_experts(x, self.gate_up.weight, self.down.weight, places, weights, self._scales(),
                           biases=self._biases(), limit=self.spec.gate_limit)

    def products(self, x: torch.Tensor | Float8Rows,
                 places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows that ``moe_sum`` adds up, and where each choice's is; on a GPU, of one token or more."""
        return moe_products(x, self.gate_up.weight, self.down.weight, places, self._scales(), biases=self._biases(),
                            limit=self.spec.gate_limit)

    @property
    def takes_float8(self) -> bool:
        """Whether tokens may come in float8, with a scale for each 128 values: they are made so in any case."""
        return self.gate_up.scale is not None and self.gate_up.by == "block"

    def _scales(self) -> Scales | None:
        gate_up, down = self.gate_up.scale, self.down.scale
        return None if gate_up is None or down is None else Scales(gate_up, down, self.gate_up.by)

    def _biases(self) -> ExpertBiases | None:
        gate_up, down = self.gate_up.bias, self.down.bias
        return None if gate_up is None or down is None else ExpertBiases(gate_up, down)

    def warm_up(self, most_tokens: int) -> None:
        """Compile the kernels for every number of tokens: tiles depend on it, and the first request of a size would
        wait for them. Each rank begins elsewhere, so that it later finds what the others of its host have compiled."""
        sizes = [1 << bits for bits in range((most_tokens - 1).bit_length())] + [most_tokens]
        first = self._group.rank * len(sizes) // self._group.size
        for tokens in sizes[first:] + sizes[:first]:
            x = self.down.stacks[0].new_zeros((tokens, self.hidden_size), dtype=self.dtype)
            choices = torch.arange(tokens * self.spec.top_k, device=x.device).view(tokens, -1) % self.places
            self(x, choices, torch.ones(choices.shape, device=x.device))

    @property
    def stacks(self) -> list[torch.Tensor]:
        """All that belongs to an expert, [S, ...] each."""
        return [*self.gate_up.stacks, *self.down.stacks]

    def slots(self) -> Iterator[Slot]:
        for layer in (self.gate_up, self.down):
            yield from layer.slots(self.residents, self.spec.num_experts)
