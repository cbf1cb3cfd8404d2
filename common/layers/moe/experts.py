"""One rank's experts, with stacked weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....kernels.arguments import Float8Rows
from ....kernels.gated_activation import GateActivation
from ...api.errors import ConfigError
from ...config.moe import MoESpec
from ...distributed.expert_parallel import ExpertParallel
from ...quantization.experts import GroupedExperts, KernelExperts
from ...quantization.shards import Shard
from ...weights.slots import Allocate, Slot
from ..activations import activation_of
from .stack import ExpertLinear


class Experts:
    """This rank's S physical experts, of each the rank's I intermediate values. Physical expert p computes the logical
    expert ``physical_to_logical[p]``.

    In the checkpoint every expert has three matrices; see ``weights.expert_names`` for other forms.
    """

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, share: ExpertParallel, allocate: Allocate):
        self.spec = spec
        self._group = share.group
        self.hidden_size, self.dtype = hidden_size, allocate.dtype
        self.num_local = share.num_local_experts(spec)
        self.physical_to_logical = list(range(share.ep_rank * self.num_local, (share.ep_rank + 1) * self.num_local))
        full, size = spec.intermediate_size, spec.intermediate_size // share.expert_tp_size
        start = share.expert_tp_rank * size

        def gate_up(expert: int) -> list[Shard]:
            return [Shard(f"{name}.{expert}.{part}_proj", index * size, size, (full, hidden_size), 0, start)
                    for index, part in enumerate(("gate", "up"))]

        def down(expert: int) -> list[Shard]:
            return [Shard(f"{name}.{expert}.down_proj", 0, hidden_size, (hidden_size, full), 1, start)]

        self.gate_up = ExpertLinear(self.num_local, hidden_size, gate_up, allocate, bias=spec.expert_bias)
        # Of the ranks whose results add up to an expert's, the first adds its bias.
        self.down = ExpertLinear(self.num_local, size, down, allocate, bias=spec.expert_bias,
                                 adds_bias=share.expert_tp_rank == 0)
        self._grouped = _grouped(self.gate_up, self.down, spec.gate_limit, _activation(spec))

    def __call__(self, x: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand of ``[T, hidden]``.

        ``local_ids`` [T, K] int64 are physical experts of this rank; one outside of ``[0, S)`` belongs to another rank
        and adds nothing. ``weights`` [T, K] float32.
        """
        return self._grouped(x, local_ids, weights)

    def products(self, x: torch.Tensor | Float8Rows,
                 local_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the rows that ``moe_sum`` adds up, and the position of each choice's; on a GPU, for one token or
        more.
        """
        return self._grouped.products(x, local_ids)

    @property
    def accepts_float8(self) -> bool:
        """True if tokens may come in float8, with a scale for each 128 values."""
        return self._grouped.accepts_float8

    def warm_up(self, max_tokens: int) -> None:
        """Compiles the kernels for every number of tokens: tiles depend on it, and the first request of a size would
        wait for them. Each rank starts with another size, so that later it finds in the cache what the others of its
        host have compiled."""
        sizes = [1 << bits for bits in range((max_tokens - 1).bit_length())] + [max_tokens]
        first = self._group.rank * len(sizes) // self._group.size
        for tokens in sizes[first:] + sizes[:first]:
            x = self.down.stacks[0].new_zeros((tokens, self.hidden_size), dtype=self.dtype)
            choices = torch.arange(tokens * self.spec.top_k, device=x.device).view(tokens, -1) % self.num_local
            self(x, choices, torch.ones(choices.shape, device=x.device))

    @property
    def stacks(self) -> list[torch.Tensor]:
        """All parameters of the experts, [S, ...] each."""
        return [*self.gate_up.stacks, *self.down.stacks]

    def slots(self) -> Iterator[Slot]:
        for layer in (self.gate_up, self.down):
            yield from layer.slots(self.physical_to_logical, self.spec.num_experts)


def _activation(spec: MoESpec) -> GateActivation | None:
    """Returns what computes the experts' activation; None for silu, which the kernels fuse."""
    return None if spec.activation in ("silu", "swish") else activation_of(spec.activation, gated=True)


def _grouped(gate_up: ExpertLinear, down: ExpertLinear, limit: float,
             activate: GateActivation | None) -> GroupedExperts:
    """Returns the computation of the experts in their quantization format."""
    if gate_up.quantization != down.quantization:
        raise ConfigError(f"The checkpoint quantizes one of {gate_up.name} and {down.name}, which are computed "
                          "together: use a checkpoint that treats them alike.")
    if gate_up.quantization is None:
        return KernelExperts(gate_up, down, limit, activate=activate)
    return gate_up.quantization.experts(gate_up, down, limit, activate)
