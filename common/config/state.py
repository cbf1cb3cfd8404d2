"""Recurrent states of a hybrid model's layers, as the engine sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateSpec:
    """The layers ``layers`` have a recurrent state, ``attention_layers`` keys and values; a layer may have both.

    A state has ``num_heads`` parts of ``head_values`` values each, which tensor-parallel ranks share out evenly.
    ``head_name``: what a part is, for the user.
    """

    layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    num_heads: int
    head_values: int
    head_name: str
