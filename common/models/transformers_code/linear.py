"""Linear layers, embedding and head in the place of transformers', split over ranks by a model's plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ...distributed.tp import TPGroup
from ...layers.linear import ColumnLinear, RowLinear
from ...layers.vocab import VocabTable
from ...weights.slots import Slot


def _in_shape_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns ``rows`` [T, n] in the leading dimensions of ``x``, of which there may be none."""
    return rows.view(*x.shape[:-1], rows.shape[-1])


class Projection(nn.Module):
    """``[..., in] -> [..., out]`` by outputs that are this rank's; ``gathers``: of all ranks."""

    def __init__(self, linear: ColumnLinear, tp: TPGroup, *, gathers: bool = False):
        super().__init__()
        self.linear, self._tp, self._gathers = linear, tp, gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.reshape(-1, x.shape[-1]))
        if self._gathers:
            y = self._tp.all_gather_last_dim(y)
        return _in_shape_of(x, y)

    @property
    def weight(self) -> torch.Tensor:
        """This rank's weight, for code that reads its type."""
        return self.linear.method.dequantize()

    def slots(self) -> Iterator[Slot]:
        yield from self.linear.slots()


class ReducedProjection(nn.Module):
    """``[..., in] -> [..., out]`` of this rank's inputs, summed over the ranks; ``splits``: it gets all inputs."""

    def __init__(self, linear: RowLinear, width: int, *, splits: bool = False):
        super().__init__()
        self.linear, self._width, self._splits = linear, width, splits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._splits:
            x = x[..., self.linear.tp.rank * self._width:][..., :self._width]
        return _in_shape_of(x, self.linear(x.reshape(-1, self._width)))

    @property
    def weight(self) -> torch.Tensor:
        """This rank's weight, for code that reads its type."""
        return self.linear.method.dequantize()

    def slots(self) -> Iterator[Slot]:
        yield from self.linear.slots()


class FusedProjections:
    """Projections of one input, computed together when the first of them is called."""

    def __init__(self, linear: ColumnLinear):
        self.linear = linear
        self._input: torch.Tensor | None = None
        self._results: dict[int, torch.Tensor] = {}

    def __call__(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input or index not in self._results:
            split = self.linear(x.reshape(-1, x.shape[-1])).split_with_sizes(self.linear.sizes, -1)
            self._input, self._results = x, dict(enumerate(split))
        result = self._results.pop(index)
        if not self._results:
            self._input = None  # frees it
        return _in_shape_of(x, result)


class FusedPart(nn.Module):
    """One of several projections of the same input."""

    def __init__(self, fused: FusedProjections, index: int):
        super().__init__()
        self._fused, self._index = fused, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._fused(self._index, x)

    @property
    def weight(self) -> torch.Tensor:
        """The weight of all parts, for code that reads its type."""
        return self._fused.linear.method.dequantize()

    def slots(self) -> Iterator[Slot]:
        if not self._index:
            yield from self._fused.linear.slots()


class Embedding(nn.Module):
    """The token embedding, split over ranks by vocabulary."""

    def __init__(self, table: VocabTable):
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.embed(ids.flatten()).view(*ids.shape, -1)

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows, for code that reads their type."""
        return self.table.weight

    def slots(self) -> Iterator[Slot]:
        yield from self.table.slots()


class Head(nn.Module):
    """The output head over all ranks' vocabulary; ``owns``: its table is not the embedding's."""

    def __init__(self, table: VocabTable, *, owns: bool):
        super().__init__()
        self.table, self._owns = table, owns

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _in_shape_of(hidden, self.table.logits(hidden.reshape(-1, hidden.shape[-1])))

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows, for code that reads their type."""
        return self.table.weight

    def slots(self) -> Iterator[Slot]:
        if self._owns:
            yield from self.table.slots()


def own_slots(modules: Sequence[nn.Module]) -> Iterator[Slot]:
    """Yields the slots of those of ``modules`` that are Baton's."""
    for module in modules:
        if isinstance(module, Projection | ReducedProjection | FusedPart | Embedding | Head):
            yield from module.slots()
