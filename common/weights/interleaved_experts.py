"""Normalizes gpt-oss's experts, with interleaved gate_up, to the names of ``expert_names``; their biases, too.

Its checkpoints stack a layer's experts, with interleaved outputs of gate and up: ``....mlp.experts.gate_up_proj``
[E, hidden, 2 * I] and ``down_proj`` [E, I, hidden], inputs before outputs; ``gate_up_proj_bias`` [E, 2 * I] and
``down_proj_bias`` [E, hidden].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from .lazy import LazyTensor

_NAME = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")


class ExpertRows(Protocol):
    """One expert's outputs, interleaved."""

    def shape(self) -> list[int]: ...

    def dtype(self) -> str: ...

    def read(self, start: int, stop: int, stride: slice) -> torch.Tensor:
        """Reads the rows ``stride`` of outputs ``[start, stop)``."""


def by_interleaved_expert(name: str, source: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    """Does as ``expert_names.by_expert``."""
    if not (match := _NAME.fullmatch(name)):
        yield name, source
        return
    experts, kind, is_bias = match.groups()
    rows_of = _Bias if is_bias else _Transposed
    yield from deinterleave(experts, kind, "bias" if is_bias else "weight",
                            [rows_of(source, expert) for expert in range(source.get_shape()[0])])


def deinterleave(experts: str, kind: str, suffix: str,
                 rows: Sequence[ExpertRows]) -> Iterator[tuple[str, LazyTensor]]:
    """Yields the projections of each of ``experts``, whose names end with ``suffix``; ``kind`` is the name of their
    stack, gate_up_proj or down_proj."""
    projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert, of_expert in enumerate(rows):
        for offset, projection in enumerate(projections):
            yield f"{experts}.{expert}.{projection}.{suffix}", _Strided(of_expert, offset, len(projections))


class _Strided:
    """A lazy slice: every ``step``-th row from ``offset`` on, read when it is sliced."""

    def __init__(self, rows: ExpertRows, offset: int, step: int):
        self._rows, self._step, self._stride = rows, step, slice(offset, None, step)

    def get_shape(self) -> list[int]:
        count, *rest = self._rows.shape()
        return [count // self._step, *rest]

    def get_dtype(self) -> str:
        return self._rows.dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, *columns = key if isinstance(key, tuple) else (key,)
        start, stop, _ = rows.indices(self.get_shape()[0])
        values = self._rows.read(start * self._step, stop * self._step, self._stride)
        return values[:, columns[0]] if columns else values


class _Bias:
    def __init__(self, source: Any, expert: int):
        self._source, self._expert = source, expert

    def shape(self) -> list[int]:
        return list(self._source.get_shape()[1:])

    def dtype(self) -> str:
        return str(self._source.get_dtype())

    def read(self, start: int, stop: int, stride: slice) -> torch.Tensor:
        result: torch.Tensor = self._source[self._expert, start:stop][stride]
        return result


class _Transposed(_Bias):
    def shape(self) -> list[int]:
        return super().shape()[::-1]

    def read(self, start: int, stop: int, stride: slice) -> torch.Tensor:
        result: torch.Tensor = self._source[self._expert, :, start:stop].T[stride]
        return result
