"""The tensors of one projection in a checkpoint of bitsandbytes in 4 bits.

``NAME.weight`` [out * in / 2, 1] uint8 has two values a byte, the first in its upper bits; a block of 64 has its
largest magnitude in ``NAME.weight.absmax``, which may be quantized itself: an index of ``nested_quant_map`` [256],
times ``nested_absmax`` of its block, plus an offset. ``NAME.weight.quant_state.bitsandbytes__KIND`` are the bytes of a
JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...kernels.reference import TABLES
from ..api.errors import ConfigError
from ..weights.lazy import InMemory, LazyTensor
from .bitsandbytes import BLOCK

_STATE = re.compile(r"(.+)\.weight\.quant_state\.bitsandbytes__(nf4|fp4)")
_PART = re.compile(r".+\.weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map)")
Find = Callable[[str], LazyTensor]


def split(name: str, tensor: LazyTensor, find: Find) -> Iterator[tuple[str, LazyTensor]]:
    """Yields ``NAME.weight`` [out, in / 2] uint8 and ``NAME.absmax`` [out, in / 64] float32."""
    if match := _STATE.fullmatch(name):
        state = _state(name, tensor)
        out, width = state["shape"]
        weight = f"{match[1]}.weight"
        yield weight, _Reshaped(lambda: find(weight)[...].view(out, width // 2), [out, width // 2], "U8")
        yield f"{match[1]}.absmax", _Reshaped(lambda: absmax_of(weight, state, find).view(out, width // BLOCK),
                                              [out, width // BLOCK], "F32")
    elif not _is_part(name, tensor):
        yield name, tensor


def unpack(name: str, tensor: LazyTensor, find: Find) -> Iterator[tuple[str, LazyTensor]]:
    """Yields weights in bfloat16."""
    if not (match := _STATE.fullmatch(name)):
        if not _is_part(name, tensor):
            yield name, tensor
        return
    parts = dict(split(name, tensor, find))
    weight, absmax = parts[f"{match[1]}.weight"], parts[f"{match[1]}.absmax"]
    out, half = weight.get_shape()
    yield f"{match[1]}.weight", _Reshaped(
        lambda: _dequantize(weight[...], absmax[...], match[2]), [out, 2 * half], "BF16")


def _dequantize(packed: torch.Tensor, absmax: torch.Tensor, kind: str) -> torch.Tensor:
    values: torch.Tensor = torch.tensor(TABLES[kind])[torch.stack((packed >> 4, packed & 15), -1).flatten(1).int()]
    values = values.unflatten(1, (-1, BLOCK)) * absmax[..., None]
    return values.flatten(1).bfloat16()


def _is_part(name: str, tensor: LazyTensor) -> bool:
    """Returns whether a tensor is read with the quant_state of its projection."""
    return _PART.fullmatch(name) is not None or (name.endswith(".weight") and tensor.get_dtype() == "U8"
                                                and tensor.get_shape()[-1] == 1)


def _state(name: str, tensor: LazyTensor) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(bytes(tensor[...].tolist()))
    if state["blocksize"] != BLOCK or state["shape"][-1] % BLOCK:
        raise ConfigError(f"{name} says blocks of {state['blocksize']} values in a weight of shape {state['shape']}: "
                          f"use a checkpoint with blocks of {BLOCK}, and a multiple of these in a row.")
    return state


def absmax_of(weight: str, state: dict[str, Any], find: Find) -> torch.Tensor:
    """Returns the scales of all blocks of the projection ``weight``, float32."""
    stored = find(f"{weight}.absmax")[...]
    if "nested_offset" not in state:
        return stored.float()
    codes = find(f"{weight}.nested_quant_map")[...].float()[stored.int()]
    nested = find(f"{weight}.nested_absmax")[...].float()
    size, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
    return codes * nested.repeat_interleave(size)[:len(codes)] + offset


class _Reshaped:
    """A LazyTensor that is made whole when it is sliced."""

    def __init__(self, make: Callable[[], torch.Tensor], shape: list[int], dtype: str):
        self._make, self._shape, self._dtype = make, shape, dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        return InMemory(self._make())[key]
