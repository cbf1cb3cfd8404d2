"""The experts that the layers of a step choose, kept for requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..layers.moe import MoE


class ChosenExpertRows:
    """A buffer ``[layers, rows, top_k]`` int32, to which each layer writes what the tokens of a step choose, in CUDA
    graphs, too; the next step overwrites it. Layers without experts have zeros."""

    def __init__(self, layers: dict[int, MoE], spec: ModelSpec, num_rows: int, device: torch.device):
        """Raises ConfigError for a model without experts."""
        if spec.moe is None or not layers:
            raise ConfigError("--enable-return-routed-experts is for mixtures of experts, which this model is not: "
                              "leave it out.")
        self._buffer = torch.zeros(spec.num_layers, num_rows, spec.moe.top_k, dtype=torch.int32, device=device)
        for index, layer in layers.items():
            layer.chosen_rows = self._buffer[index]

    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Returns ``[n, layers, top_k]`` of these token rows of the last step, in order of the device's stream."""
        index = torch.from_numpy(rows.astype(np.int64)).to(self._buffer.device, non_blocking=True)
        return self._buffer[:, index].transpose(0, 1).contiguous()
