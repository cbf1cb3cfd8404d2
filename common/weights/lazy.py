"""Tensors of a checkpoint that are read when they are sliced."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class LazyTensor(Protocol):
    """A tensor of a checkpoint, as safetensors' ``get_slice`` returns it: a slice reads just that part."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """Returns safetensors' name of the type: "BF16", "F8_E4M3", "I8", ..."""

    def __getitem__(self, key: Any) -> torch.Tensor: ...


DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
           torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
           torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
TYPES = {name: dtype for dtype, name in DTYPES.items()}


class Derived:
    """Base of LazyTensors whose slices are made of slices of another ``tensor``: as it is here, of its shape and
    type."""

    def __init__(self, tensor: LazyTensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return self._tensor.get_shape()

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()


def sliced_rows(key: Any, rows: int) -> tuple[int, int, tuple[Any, ...]]:
    """Returns the first row of ``rows`` that a slice's ``key`` takes, the one after its last, and the rest of the
    key."""
    own, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
    start, stop, _ = (slice(None) if own is Ellipsis else own).indices(rows)
    return start, stop, rest


class WithRows(Derived):
    """A LazyTensor with ``rows`` rows: the first ones of ``tensor``, then zeros."""

    def __init__(self, tensor: LazyTensor, rows: int):
        super().__init__(tensor)
        self._rows = rows

    def get_shape(self) -> list[int]:
        return [self._rows, *self._tensor.get_shape()[1:]]

    def __getitem__(self, key: Any) -> torch.Tensor:
        start, stop, rest = sliced_rows(key, self._rows)
        there = self._tensor.get_shape()[0]
        found = self._tensor[(slice(min(start, there), min(stop, there)), *rest)]
        missing = stop - start - len(found)
        return torch.cat([found, found.new_zeros(missing, *found.shape[1:])]) if missing else found


class InMemory:
    """A LazyTensor over a tensor."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return DTYPES[self._tensor.dtype]

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._tensor[key]
