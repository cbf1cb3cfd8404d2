"""The heads of classifiers and reward models, replicated on every rank: a few rows of weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...kernels.gemm.dense_matmul import library_matmul
from ..weights.slots import Allocate, Slot


class ClassifierHead:
    """Classification head ``[R, hidden] -> [R, labels]``."""

    def __init__(self, name: str, num_labels: int, hidden_size: int, allocate: Allocate):
        self.name = name
        self.weight = allocate(num_labels, hidden_size)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores of hidden states of any float type."""
        return library_matmul(hidden.to(self.weight.dtype), self.weight).float()

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape))


class TwoLayerHead:
    """``[R, hidden] -> [R, labels]`` by two layers with biases, ``{name}.0`` and ``{name}.2``, and a ReLU between."""

    def __init__(self, name: str, num_labels: int, hidden_size: int, allocate: Allocate):
        self._layers = [(f"{name}.{index}", allocate(size, hidden_size), allocate(size))
                        for index, size in ((0, hidden_size), (2, num_labels))]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores of hidden states of any float type."""
        (_, weight, bias), (_, out_weight, out_bias) = self._layers
        inner = torch.relu(library_matmul(hidden.to(weight.dtype), weight) + bias)
        return (library_matmul(inner, out_weight) + out_bias).float()

    def slots(self) -> Iterator[Slot]:
        for name, weight, bias in self._layers:
            yield Slot(f"{name}.weight", weight, tuple(weight.shape))
            yield Slot(f"{name}.bias", bias, tuple(bias.shape))


class WeightedRewardHead:
    """``[R, hidden] -> [R, 1]``: the sum of the scores of ``attributes``, each with a weight of its own. ``score``
    gives two values an attribute, of which the first is its score, and ``weights.fc``, three layers with SELU between
    them, the weights (the format of ``LlamaForSequenceClassificationWithNormal_Weights``)."""

    def __init__(self, attributes: int, hidden_size: int, allocate: Allocate):
        self._score = ClassifierHead("score", 2 * attributes, hidden_size, allocate)
        self._layers = [(f"weights.fc.{index}", allocate(size, hidden_size), allocate(size))
                        for index, size in ((0, hidden_size), (2, hidden_size), (4, attributes))]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 rewards of hidden states of any float type."""
        x = hidden.to(self._layers[0][1].dtype)
        for number, (_, weight, bias) in enumerate(self._layers):
            x = library_matmul(torch.selu(x) if number else x, weight) + bias
        return (self._score(hidden)[:, ::2] * x.float()).sum(-1, keepdim=True)

    def slots(self) -> Iterator[Slot]:
        yield from self._score.slots()
        for name, weight, bias in self._layers:
            yield Slot(f"{name}.weight", weight, tuple(weight.shape))
            yield Slot(f"{name}.bias", bias, tuple(bias.shape))
