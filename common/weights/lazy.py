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


class WithRows:
    """A LazyTensor with ``rows`` rows: the first ones of ``tensor``, then zeros."""

    def __init__(self, tensor: LazyTensor, rows: int):
        self._tensor = tensor
        self._rows = rows

    def get_shape(self) -> list[int]:
        return [self._rows, *self._tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        own, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        start, stop, _ = (slice(None) if own is Ellipsis else own).indices(self._rows)
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
