"""The Mamba-2 mixers of a model, as its config.json states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..api.errors import ConfigError
from .state import StateSpec

if TYPE_CHECKING:
    from ...kernels.arguments import Mamba2


@dataclass(frozen=True)
class Mamba2Spec:
    """``mamba_heads`` are those of a group, each of ``mamba_head_dim`` values; a convolution has ``mamba_taps`` inputs.
    Gates multiply the output, which is normed by group before (norm_first), after (gate_first) or not at all (none).
    Time steps are at least ``mamba_least_step``."""

    mamba_groups: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_state_dim: int
    mamba_taps: int
    mamba_norm: Literal["norm_first", "gate_first", "none"]
    mamba_conv_bias: bool
    mamba_least_step: float = 0.0

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.mamba_groups * self.mamba_heads * self.mamba_head_dim

    @property
    def in_sizes(self) -> tuple[int, int, int, int, int]:
        """Rows of the input projection: those of gates, x, B, C and time steps."""
        group = self.mamba_groups * self.mamba_state_dim
        return self.inner, self.inner, group, group, self.mamba_groups * self.mamba_heads

    def shape(self) -> Mamba2:
        from ...kernels.arguments import Mamba2

        return Mamba2(self.mamba_groups, self.mamba_heads, self.mamba_head_dim, self.mamba_state_dim, self.mamba_taps)

    def state(self, layers: tuple[int, ...], attention_layers: tuple[int, ...]) -> StateSpec:
        """Returns the states of a model whose ``layers`` are mixers, and whose ``attention_layers`` have KV heads."""
        heads = self.mamba_heads * self.mamba_head_dim
        values = (heads + 2 * self.mamba_state_dim) * (self.mamba_taps - 1) + heads * self.mamba_state_dim
        return StateSpec(layers, attention_layers, self.mamba_groups, values, "groups of Mamba-2 heads")


def heads_of_group(inner: int, heads: int, groups: int) -> int:
    """Returns the heads of a group; raises ConfigError where ``inner`` values do not come out even."""
    if heads % groups or inner % heads:
        raise ConfigError(f"config.json gives {inner} values to {heads} Mamba-2 heads of {groups} groups, which does "
                          "not come out even.")
    return heads // groups


def check_mamba2(values: Mapping[str, Any], *biases: str) -> None:
    """Raises ConfigError for ``biases`` of projections, and for limits of time steps."""
    for name in biases:
        if values.get(name):
            raise ConfigError(f"config.json states {name}, which is not supported: use a checkpoint without biases.")
    least, most = values["time_step_limit"] or (0.0, float("inf"))
    if least or most not in (float("inf"), {"__float__": "Infinity"}):
        raise ConfigError(f"config.json limits time steps to {values['time_step_limit']}, which is not supported.")
