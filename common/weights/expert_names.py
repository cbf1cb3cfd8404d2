"""Splits stacks of experts into three matrices an expert: ``....mlp.experts.{e}.gate_proj.weight``, ``up_proj`` and
``down_proj``.

Transformers 5 stacks them in memory, and saves them so with ``save_original_format=False``:
``....mlp.experts.gate_up_proj`` [E, 2 * I, hidden] and ``....mlp.experts.down_proj`` [E, hidden, I].
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def by_expert(name: str, source: Any, *, transposed: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields ``source`` (safetensors' lazy slice), or its matrices where it stacks those of several experts, with their
    names. ``transposed``: stacked matrices have inputs before outputs (Llama 4)."""
    if stacked := _STACKED.fullmatch(name):
        yield from _unstacked(stacked[1], stacked[2], _TransposedStack(source) if transposed else source)
    else:
        yield name, source


def _unstacked(experts: str, kind: str, source: Any) -> Iterator[tuple[str, Any]]:
    count, rows, columns = source.get_shape()
    parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows // 2)}
    if kind == "down_proj":
        parts = {"down_proj": (0, rows)}
    for expert in range(count):
        for part, (first, size) in parts.items():
            yield f"{experts}.{expert}.{part}.weight", _Matrix(source, expert, first, size, columns)


class _TransposedStack:
    """A stack [E, out, in] over ``source`` [E, in, out]."""

    def __init__(self, source: Any):
        self._source = source

    def get_shape(self) -> list[int]:
        count, columns, rows = self._source.get_shape()
        return [count, rows, columns]

    def get_dtype(self) -> str:
        return str(self._source.get_dtype())

    def __getitem__(self, key: tuple[int, slice, slice]) -> torch.Tensor:
        index, rows, columns = key
        result: torch.Tensor = self._source[index, columns, rows].T
        return result


class _Matrix:
    """A lazy slice: rows of one matrix of a stack, read when they are sliced."""

    def __init__(self, source: Any, index: int, first: int, rows: int, columns: int):
        self._source = source
        self._index = index
        self._first = first
        self._shape = (rows, columns)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        result: str = self._source.get_dtype()
        return result

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        start, stop, _ = rows.indices(self._shape[0])
        result: torch.Tensor = self._source[self._index, self._first + start:self._first + stop, columns]
        return result
