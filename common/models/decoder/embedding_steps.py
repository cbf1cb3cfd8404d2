"""What models do with their embeddings before the first layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...config.model import ModelSpec
from ...weights.slots import Allocate, Slot
from .blocks import EmbeddingStep, MakeEmbeddingStep, MakeNorm, Norm


class Scaled:
    """Multiplies embeddings by ``multiplier``, rounded to their type."""

    def __init__(self, multiplier: float, allocate: Allocate, *, tokens_only: bool):
        self.tokens_only = tokens_only
        # As a number of the type: transformers multiplies by a tensor, Gemma's sqrt(3072) is 55.5 in bfloat16.
        self._multiplier = torch.tensor(multiplier, dtype=allocate.dtype).item()

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x * self._multiplier

    def slots(self) -> Iterator[Slot]:
        yield from ()


def scaled(multiplier: float, *, tokens_only: bool = False) -> MakeEmbeddingStep:
    """Returns a factory of steps that multiply by ``multiplier``. ``tokens_only``: see EmbeddingStep."""
    def make(spec: ModelSpec, allocate: Allocate) -> EmbeddingStep:
        return Scaled(multiplier, allocate, tokens_only=tokens_only)

    return make


class LearnedPositions:
    """Adds a learned embedding of each position: row ``position + offset`` of the table ``name``."""

    tokens_only = False

    def __init__(self, name: str, rows: int, hidden_size: int, offset: int, allocate: Allocate):
        self.name = name
        self._offset = offset
        self.weight = allocate(rows, hidden_size)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.embedding(positions + self._offset, self.weight)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape))


def learned_positions(name: str, rows: int, offset: int = 0) -> MakeEmbeddingStep:
    """Returns a factory of LearnedPositions, whose table has ``rows`` rows."""
    def make(spec: ModelSpec, allocate: Allocate) -> EmbeddingStep:
        return LearnedPositions(name, rows, spec.hidden_size, offset, allocate)

    return make


class NormedEmbeddings:
    """Norms embeddings."""

    tokens_only = False

    def __init__(self, norm: Norm):
        self._norm = norm

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._norm(x)

    def slots(self) -> Iterator[Slot]:
        yield from self._norm.slots()


def normed(name: str, norm: MakeNorm) -> MakeEmbeddingStep:
    """Returns a factory of steps that norm embeddings, by a norm of this name."""
    def make(spec: ModelSpec, allocate: Allocate) -> EmbeddingStep:
        return NormedEmbeddings(norm(name, spec.hidden_size, allocate, None))

    return make
