"""Features: hidden states of a model that a draft model reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class CapturedStates:
    """Copies of the hidden states ``[T, hidden]`` that enter some ``layers``, which later layers would overwrite. A
    step in micro-batches adds a layer's rows in parts, in order."""

    def __init__(self, layers: Sequence[int]):
        self.layers = frozenset(layers)
        self._order = tuple(layers)
        self._parts: dict[int, list[torch.Tensor]] = {}

    def add(self, layer: int, states: torch.Tensor) -> None:
        """Copies the states that enter ``layer`` if it is one of ``layers``."""
        if layer in self.layers:
            self._parts.setdefault(layer, []).append(states.clone())

    def joined(self) -> torch.Tensor:
        """Returns the states of all layers, side by side ``[T, layers * hidden]``, in the order in which the layers
        were named."""
        return torch.cat([parts[0] if len(parts) == 1 else torch.cat(parts)
                          for parts in (self._parts[layer] for layer in self._order)], dim=-1)
