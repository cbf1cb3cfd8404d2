"""Splits tensors in which checkpoints keep several projections, and names them as the model does: for ``tensor_parts``
of families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from .lazy import Derived, LazyTensor, sliced_rows
from .loader import TensorParts


class RowRange(Derived):
    """A LazyTensor of the rows ``[start, stop)`` of ``tensor``."""

    def __init__(self, tensor: LazyTensor, start: int, stop: int):
        super().__init__(tensor)
        self._start, self._stop = start, stop

    def get_shape(self) -> list[int]:
        return [self._stop - self._start, *self._tensor.get_shape()[1:]]

    def __getitem__(self, key: Any) -> torch.Tensor:
        start, stop, rest = sliced_rows(key, self._stop - self._start)
        return self._tensor[(slice(self._start + start, self._start + stop), *rest)]


class GroupedRows(Derived):
    """A LazyTensor of the rows ``[start, stop)`` of each group of ``tensor``, which has groups of ``size`` rows. It
    reads the whole groups that a slice touches."""

    def __init__(self, tensor: LazyTensor, size: int, start: int, stop: int):
        super().__init__(tensor)
        self._size, self._start, self._own = size, start, stop - start

    def get_shape(self) -> list[int]:
        rows, *rest = self._tensor.get_shape()
        return [rows // self._size * self._own, *rest]

    def __getitem__(self, key: Any) -> torch.Tensor:
        start, stop, rest = sliced_rows(key, self.get_shape()[0])
        first, last = start // self._own, -(-stop // self._own)
        groups = self._tensor[(slice(first * self._size, last * self._size), *rest)].unflatten(0, (-1, self._size))
        rows: torch.Tensor = groups[:, self._start:self._start + self._own].flatten(0, 1)
        return rows[start - first * self._own:stop - first * self._own]


class Transposed(Derived):
    """A LazyTensor of the transposed matrix ``tensor`` (GPT-2's Conv1D); it reads what a slice needs."""

    def get_shape(self) -> list[int]:
        return self._tensor.get_shape()[::-1]

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key is Ellipsis:
            key = slice(None)
        rows, *columns = key if isinstance(key, tuple) else (key,)
        part: torch.Tensor = self._tensor[columns[0] if columns else slice(None), rows]
        return part.T


_BY_COLUMNS = ("qweight", "qzeros", "scales")
"""Tensors of AWQ's and GPTQ's projections that have a projection's outputs along their last dimension."""
OF_INPUTS = ("g_idx", "weight_g_idx", "weight_shape", "input_scale", "input_zero_point", "activation_scale")
"""Tensors of a quantized projection that belong to its inputs."""


def split_outputs(kind: str, tensor: LazyTensor, sizes: Sequence[int]) -> Iterator[LazyTensor]:
    """Yields the parts of a fused projection's tensor ``kind`` ("weight", "bias", or a quantization format's) that
    belong to ``sizes`` of its outputs."""
    if kind in OF_INPUTS:
        yield from (tensor for _ in sizes)
    elif kind in _BY_COLUMNS:
        yield from (Transposed(part) for part in split_rows(Transposed(tensor), sizes))
    else:
        yield from split_rows(tensor, sizes)


class Scaled(Derived):
    """A LazyTensor of ``tensor`` times ``factor``, rounded once to the parameter's type."""

    def __init__(self, tensor: LazyTensor, factor: float):
        super().__init__(tensor)
        self._factor = factor

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._tensor[key].float() * self._factor


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


class NormalizedRows(Derived):
    """A LazyTensor of ``tensor`` with rows of length 1. Slices hold whole rows."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.nn.functional.normalize(self._tensor[key])


class SwappedHalves(Derived):
    """A LazyTensor of the matrix ``tensor`` with its right half of columns before its left one."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        whole: torch.Tensor = self._tensor[rows]
        return torch.cat(whole.chunk(2, dim=1)[::-1], dim=1)[:, columns]


def grouped_qkv(spec: ModelSpec, module: str, renamed: Mapping[str, str]) -> TensorParts:
    """Returns a TensorParts for checkpoints whose ``module`` has, for one KV head after another, the queries that share
    it, its key and its value; ``renamed`` as for ``split_names``. The function raises ConfigError for a quantized
    ``module`` whose outputs are packed together."""
    head = spec.head_dim
    queries = spec.num_heads // spec.num_kv_heads * head
    group = queries + 2 * head
    spans = {"q_proj": (0, queries), "k_proj": (queries, queries + head), "v_proj": (queries + head, group)}
    rename = split_names({}, renamed)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        for own, part in rename(name, tensor):
            if f".{module}." not in own:
                yield own, part
                continue
            if part.get_shape()[:1] != [group * spec.num_kv_heads]:
                raise ConfigError(f"{name} packs the outputs of several heads, which are read in another order: use an "
                                  "unquantized checkpoint.")
            for projection, (start, stop) in spans.items():
                yield own.replace(f".{module}.", f".{projection}."), GroupedRows(part, group, start, stop)

    return parts
