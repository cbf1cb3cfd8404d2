"""The heads of classifiers and reward models, replicated on every rank: a few rows of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...kernels.gemm.dense_matmul import library_matmul
from ..weights.slots import Allocate, Slot
from .activations import Activation


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


class _Layers:
    """Linear layers of hidden states with biases, ``{name}.0``, ``{name}.2``, ... with ``sizes`` outputs, and an
    activation between them."""

    def __init__(self, name: str, sizes: Sequence[int], hidden_size: int, activate: Activation, allocate: Allocate):
        self._layers = [(f"{name}.{2 * number}", allocate(size, hidden_size), allocate(size))
                        for number, size in enumerate(sizes)]
        self._activate = activate

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.to(self._layers[0][1].dtype)
        for number, (_, weight, bias) in enumerate(self._layers):
            x = library_matmul(self._activate(x) if number else x, weight) + bias
        return x.float()

    def slots(self) -> Iterator[Slot]:
        for name, weight, bias in self._layers:
            yield Slot(f"{name}.weight", weight, tuple(weight.shape))
            yield Slot(f"{name}.bias", bias, tuple(bias.shape))


class TwoLayerHead:
    """``[R, hidden] -> [R, labels]`` by two layers with biases, ``{name}.0`` and ``{name}.2``, and a ReLU between."""

    def __init__(self, name: str, num_labels: int, hidden_size: int, allocate: Allocate):
        self._layers = _Layers(name, (hidden_size, num_labels), hidden_size, torch.relu, allocate)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores of hidden states of any float type."""
        return self._layers(hidden)

    def slots(self) -> Iterator[Slot]:
        return self._layers.slots()


class WeightedRewardHead:
    """``[R, hidden] -> [R, 1]``: the sum of the scores of ``attributes``, each with a weight of its own. ``score``
    gives two values an attribute, of which the first is its score, and ``weights.fc``, three layers with SELU between
    them, the weights (the format of ``LlamaForSequenceClassificationWithNormal_Weights``)."""

    def __init__(self, attributes: int, hidden_size: int, allocate: Allocate):
        self._score = ClassifierHead("score", 2 * attributes, hidden_size, allocate)
        self._weights = _Layers("weights.fc", (hidden_size, hidden_size, attributes), hidden_size, torch.selu, allocate)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 rewards of hidden states of any float type."""
        return (self._score(hidden)[:, ::2] * self._weights(hidden)).sum(-1, keepdim=True)

    def slots(self) -> Iterator[Slot]:
        yield from self._score.slots()
        yield from self._weights.slots()
