"""gpt-oss's experts in the common form of ``expert_names``, with biases beside the weights.

Its checkpoints stack a layer's experts, gate's and up's outputs in turns: ``....mlp.experts.gate_up_proj``
[E, hidden, 2 * I] and ``down_proj`` [E, I, hidden], inputs before outputs; ``gate_up_proj_bias`` [E, 2 * I] and
``down_proj_bias`` [E, hidden]. Those in MXFP4 (OCP Microscaling Formats, 1.0) hold outputs before inputs, packed:
``..._blocks`` [E, out, in / 32, 16] uint8, two values of four bits (E2M1) a byte, the lower half first, and
``..._scales`` [E, out, in / 32] uint8, the power of two of each block, plus 127.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

_NAME = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Find = Callable[[str], Any]
"""The lazy slice of another tensor of the checkpoint."""


def by_expert_in_turns(name: str, source: Any, find: Find) -> Iterator[tuple[str, Any]]:
    """As ``expert_names.by_expert``; scales are read with their blocks, whichever file they are in."""
    if not (found := _NAME.fullmatch(name)):
        yield name, source
        return
    experts, kind, what = found.groups()
    if what == "_scales":
        return
    scales = find(f"{experts}.{kind}_scales") if what == "_blocks" else None
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert in range(source.get_shape()[0]):
        rows: _Rows = _Mxfp4(source, scales, expert)
        if what != "_blocks":
            rows = _Bias(source, expert) if what == "_bias" else _Transposed(source, expert)
        for turn, part in enumerate(parts):
            yield (f"{experts}.{expert}.{part}.{'bias' if what == '_bias' else 'weight'}",
                   _Turn(rows, turn, len(parts)))


class _Rows(Protocol):
    """One expert's outputs, all parts of them in turns."""

    def shape(self) -> list[int]: ...

    def dtype(self) -> str: ...

    def read(self, start: int, stop: int, turn: slice) -> torch.Tensor:
        """Of outputs ``[start, stop)`` those of ``turn``, whole."""


class _Turn:
    """Every ``step``-th row from ``first`` on, read when it is sliced."""

    def __init__(self, rows: _Rows, first: int, step: int):
        self._rows, self._step, self._turn = rows, step, slice(first, None, step)

    def get_shape(self) -> list[int]:
        count, *rest = self._rows.shape()
        return [count // self._step, *rest]

    def get_dtype(self) -> str:
        return self._rows.dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, *columns = key if isinstance(key, tuple) else (key,)
        start, stop, _ = rows.indices(self.get_shape()[0])
        taken = self._rows.read(start * self._step, stop * self._step, self._turn)
        return taken[:, columns[0]] if columns else taken


class _Bias:
    def __init__(self, source: Any, expert: int):
        self._source, self._expert = source, expert

    def shape(self) -> list[int]:
        return list(self._source.get_shape()[1:])

    def dtype(self) -> str:
        return str(self._source.get_dtype())

    def read(self, start: int, stop: int, turn: slice) -> torch.Tensor:
        result: torch.Tensor = self._source[self._expert, start:stop][turn]
        return result


class _Transposed(_Bias):
    def shape(self) -> list[int]:
        return super().shape()[::-1]

    def read(self, start: int, stop: int, turn: slice) -> torch.Tensor:
        result: torch.Tensor = self._source[self._expert, :, start:stop].T[turn]
        return result


class _Mxfp4:
    """Made bfloat16, which holds every value."""

    def __init__(self, blocks: Any, scales: Any, expert: int):
        self._blocks, self._scales, self._expert = blocks, scales, expert

    def shape(self) -> list[int]:
        _, rows, blocks, half = self._blocks.get_shape()
        return [rows, blocks * half * 2]

    def dtype(self) -> str:
        return "BF16"

    def read(self, start: int, stop: int, turn: slice) -> torch.Tensor:
        return from_mxfp4(*(part[self._expert, start:stop][turn] for part in (self._blocks, self._scales)))


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``blocks`` [rows, n, 16] and ``scales`` [rows, n], uint8, to bfloat16 ``[rows, n * 32]``."""
    halves = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((halves[byte % 16], halves[byte // 16]), -1).view(torch.int32)[:, 0]  # one look-up a byte
    values = pairs[blocks.flatten().int()].view(torch.bfloat16).view(*scales.shape, 32)
    return (values * torch.ldexp(torch.ones(scales.shape), scales.int() - 127).bfloat16()[..., None]).flatten(1)
