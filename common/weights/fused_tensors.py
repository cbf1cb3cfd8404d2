"""Splits tensors in which checkpoints keep several projections, and names them as the model does: for ``tensor_parts``
of families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..config.model import ModelSpec
from .lazy import LazyTensor
from .loader import TensorParts


class RowRange:
    """A LazyTensor of the rows ``[start, stop)`` of ``tensor``."""

    def __init__(self, tensor: LazyTensor, start: int, stop: int):
        self._tensor = tensor
        self._start, self._stop = start, stop

    def get_shape(self) -> list[int]:
        return [self._stop - self._start, *self._tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        own, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        start, stop, _ = (slice(None) if own is Ellipsis else own).indices(self._stop - self._start)
        return self._tensor[(slice(self._start + start, self._start + stop), *rest)]


class GroupedRows:
    """A LazyTensor of the rows ``[start, stop)`` of each ``group`` of rows of ``tensor``, as where a head's query, key
    and value follow each other. Slices hold whole parts of groups."""

    def __init__(self, tensor: LazyTensor, group: int, start: int, stop: int):
        self._tensor = tensor
        self._group, self._start, self._stop = group, start, stop

    def get_shape(self) -> list[int]:
        rows, *rest = self._tensor.get_shape()
        return [rows // self._group * (self._stop - self._start), *rest]

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        own, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        each = self._stop - self._start
        start, stop, _ = (slice(None) if own is Ellipsis else own).indices(self.get_shape()[0])
        rows = self._tensor[(slice(start // each * self._group, stop // each * self._group), *rest)]
        groups: torch.Tensor = rows.unflatten(0, (-1, self._group))
        return groups[:, self._start:self._stop].flatten(0, 1)


class Transposed:
    """A LazyTensor of the transposed matrix ``tensor`` (GPT-2's Conv1D); it reads what a slice needs."""

    def __init__(self, tensor: LazyTensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return self._tensor.get_shape()[::-1]

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key is Ellipsis:
            key = slice(None)
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        part: torch.Tensor = self._tensor[columns, rows]
        return part.T


_BY_COLUMNS = ("qweight", "qzeros", "scales")
"""Tensors of AWQ's and GPTQ's projections that have a projection's outputs along their last dimension."""
_OF_INPUTS = ("g_idx", "weight_g_idx", "weight_shape")
"""Tensors of a quantized projection that belong to its inputs."""


def split_outputs(kind: str, tensor: LazyTensor, sizes: Sequence[int]) -> Iterator[LazyTensor]:
    """Yields the parts of a fused projection's tensor ``kind`` ("weight", "bias", or a quantization format's) that
    belong to ``sizes`` of its outputs."""
    if kind in _OF_INPUTS:
        yield from (tensor for _ in sizes)
    elif kind in _BY_COLUMNS:
        yield from (Transposed(part) for part in split_rows(Transposed(tensor), sizes))
    else:
        yield from split_rows(tensor, sizes)


def split_rows(tensor: LazyTensor, sizes: Sequence[int]) -> Iterator[LazyTensor]:
    """Yields the parts of ``tensor`` of these numbers of rows. A tensor with fewer rows has its parts in proportion (a
    scale for each block of rows), and one of a single value belongs to all of them."""
    shape = tensor.get_shape()
    if not shape or (len(shape) == 1 and shape[0] == 1 < sum(sizes)):
        yield from (tensor for _ in sizes)
        return
    start = 0
    for size in sizes:
        stop = start + size * shape[0] // sum(sizes)
        yield RowRange(tensor, start, stop)
        start = stop


def split_names(fused: Mapping[str, Mapping[str, int]], renamed: Mapping[str, str] | None = None) -> TensorParts:
    """Returns a TensorParts: ``fused`` maps the name of a module within a checkpoint's names to the modules that take
    its place, each with its rows, in their order; ``renamed`` maps other parts of names to the model's, tried in
    order, each where a name has it."""
    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        for old, new in (renamed or {}).items():
            name = name.replace(old, new)
        for module, rows in fused.items():
            if f".{module}." in name:
                return [(name.replace(f".{module}.", f".{own}."), part)
                        for own, part in zip(rows, split_outputs(name.rpartition(".")[2], tensor, list(rows.values())))]
        return [(name, tensor)]

    return parts


def qkv_rows(spec: ModelSpec, prefix: str = "") -> dict[str, int]:
    """Returns the rows of queries, keys and values that are one after the other in one tensor, for ``split_names``."""
    kv = spec.num_kv_heads * spec.head_dim
    return {f"{prefix}q_proj": spec.num_heads * spec.head_dim, f"{prefix}k_proj": kv, f"{prefix}v_proj": kv}
