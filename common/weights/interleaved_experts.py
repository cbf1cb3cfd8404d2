"""Normalizes gpt-oss's experts, with interleaved gate_up, to the names of ``expert_names``; their biases, too.

Its checkpoints stack a layer's experts, with interleaved outputs of gate and up: ``....mlp.experts.gate_up_proj``
[E, hidden, 2 * I] and ``down_proj`` [E, I, hidden], inputs before outputs; ``gate_up_proj_bias`` [E, 2 * I] and
``down_proj_bias`` [E, hidden]. Those in MXFP4 (OCP Microscaling Formats, 1.0) have outputs before inputs, packed:
``..._blocks`` [E, out, in / 32, 16] uint8, two values of four bits (E2M1) a byte, the lower nibble first, and
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
"""Returns the lazy slice of another tensor of the checkpoint."""


def by_interleaved_expert(name: str, source: Any, find: Find) -> Iterator[tuple[str, Any]]:
    """Does as ``expert_names.by_expert``; scales are read with their blocks, whichever file they are in."""
    if not (match := _NAME.fullmatch(name)):
        yield name, source
        return
    experts, kind, suffix = match.groups()
    if suffix == "_scales":
        return
    scales = find(f"{experts}.{kind}_scales") if suffix == "_blocks" else None
    projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert in range(source.get_shape()[0]):
        rows: _Rows = _Mxfp4(source, scales, expert)
        if suffix != "_blocks":
            rows = _Bias(source, expert) if suffix == "_bias" else _Transposed(source, expert)
        for offset, projection in enumerate(projections):
            yield (f"{experts}.{expert}.{projection}.{'bias' if suffix == '_bias' else 'weight'}",
                   _Strided(rows, offset, len(projections)))


class _Rows(Protocol):
    """One expert's outputs, interleaved."""

    def shape(self) -> list[int]: ...

    def dtype(self) -> str: ...

    def read(self, start: int, stop: int, stride: slice) -> torch.Tensor:
        """Reads the rows ``stride`` of outputs ``[start, stop)``."""


class _Strided:
    """A lazy slice: every ``step``-th row from ``offset`` on, read when it is sliced."""

    def __init__(self, rows: _Rows, offset: int, step: int):
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


class _Mxfp4:
    """Values in MXFP4, converted to bfloat16, which represents all of them."""

    def __init__(self, blocks: Any, scales: Any, expert: int):
        self._blocks, self._scales, self._expert = blocks, scales, expert

    def shape(self) -> list[int]:
        _, rows, blocks, block_bytes = self._blocks.get_shape()
        return [rows, blocks * block_bytes * 2]

    def dtype(self) -> str:
        return "BF16"

    def read(self, start: int, stop: int, stride: slice) -> torch.Tensor:
        return from_mxfp4(*(part[self._expert, start:stop][stride] for part in (self._blocks, self._scales)))


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantizes ``blocks`` [rows, n, 16] and ``scales`` [rows, n], uint8, to bfloat16 ``[rows, n * 32]``."""
    nibbles = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((nibbles[byte % 16], nibbles[byte // 16]), -1).view(torch.int32)[:, 0]  # one look-up a byte
    values = pairs[blocks.flatten().int()].view(torch.bfloat16).view(*scales.shape, 32)
    return (values * torch.ldexp(torch.ones(scales.shape), scales.int() - 127).bfloat16()[..., None]).flatten(1)
