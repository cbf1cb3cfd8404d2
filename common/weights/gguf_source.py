"""Weights from a GGUF file, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...kernels.gguf_blocks import BLOCKS
from ...kernels.reference import dequantize_gguf
from ..api.errors import ConfigError
from ..config.checkpoint import resolve_checkpoint
from ..config.described.gguf import chosen_gguf
from ..config.gguf_families import family_of
from ..config.gguf_file import GgufTensor, find_gguf, read_gguf
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from .interleaved_rotary import ReorderedRows, half_order
from .lazy import Derived, LazyTensor
from .plain_reads import OpenFile
from .samples import StoredTensor, sample_tensors
from .slots import Slot
from .source import SourceTensor, find_among

PACKED = "packed"
"""Ends the name of a layer's rows of quantized blocks, uint8, where others have ``weight``."""


@LOAD_FORMATS.register("gguf")
class GgufSource:
    """The tensors of the GGUF file that ``args`` name. Layers whose slots take blocks get these, all others values."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        folder = resolve_checkpoint(args)
        found = find_gguf(folder)
        if found is None:
            raise ConfigError(f"{folder} holds no .gguf files, which --load-format gguf reads.")
        self.name = str(found)
        self._file = read_gguf(found)
        self._family = family_of(self._file)
        self._opened: dict[Path, OpenFile] = {}

    @staticmethod
    def finds(args: ModelArgs, folder: Path) -> bool:
        return chosen_gguf(args, folder) is not None

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        packed = {slot.name for slot in slots}
        for tensor in self._file.tensors.values():
            name = self._family.name_of(tensor.name)
            if name is None:
                continue
            packed_name = f"{name.removesuffix('weight')}{PACKED}"
            if packed_name in packed:
                yield SourceTensor(packed_name, self._ordered(tensor, self._bytes(tensor)), tensor.file.name)
            else:
                for own, part in self._values(name, tensor):
                    yield SourceTensor(own, part, tensor.file.name)

    def _values(self, name: str, tensor: GgufTensor) -> Iterator[tuple[str, LazyTensor]]:
        if ".*." not in name:
            yield name, self._ordered(tensor, self._value(tensor))
            return
        count, *shape = tensor.shape
        each = tensor.num_bytes // count
        for expert in range(count):
            own = replace(tensor, shape=tuple(shape), start=tensor.start + expert * each, num_bytes=each)
            yield name.replace("*", str(expert)), self._value(own)

    def _value(self, tensor: GgufTensor) -> LazyTensor:
        if tensor.kind in BLOCKS:
            return _Dequantized(self._bytes(tensor), tensor)
        if self._family.added_to_norms and tensor.name.endswith("norm.weight"):
            return _Less(self._plain(tensor), self._family.added_to_norms)
        return self._plain(tensor)

    def _plain(self, tensor: GgufTensor) -> LazyTensor:
        # A projection to one value is a vector here.
        shape = (1, *tensor.shape) if tensor.name.endswith("ffn_gate_inp_shexp.weight") else tensor.shape
        return self._read(StoredTensor(tensor.name, tensor.kind, shape, tensor.file, tensor.start, tensor.num_bytes))

    def _bytes(self, tensor: GgufTensor) -> LazyTensor:
        shape = (*tensor.shape[:-1], BLOCKS[tensor.kind].row_bytes(tensor.shape[-1]))
        return self._read(StoredTensor(tensor.name, "U8", shape, tensor.file, tensor.start, tensor.num_bytes))

    def _read(self, tensor: StoredTensor) -> LazyTensor:
        if tensor.file not in self._opened:
            self._opened[tensor.file] = OpenFile(tensor.file)
        return self._opened[tensor.file].tensor(tensor)

    def _ordered(self, tensor: GgufTensor, values: LazyTensor) -> LazyTensor:
        if not self._family.pairs_heads or ".attn_q." not in tensor.name and ".attn_k." not in tensor.name:
            return values
        heads = self._file.get("attention.head_count")
        if ".attn_k." in tensor.name:
            heads = self._file.get("attention.head_count_kv", heads)
        head_dim = tensor.shape[0] // heads
        return ReorderedRows(values, half_order(head_dim, head_dim))

    def find(self, name: str) -> LazyTensor:
        return find_among(self, name)

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        stored = [StoredTensor(own, tensor.kind, tensor.shape, tensor.file, tensor.start, tensor.num_bytes)
                  for tensor in self._file.tensors.values()
                  if (own := self._family.name_of(tensor.name)) is not None and not is_optional(own)]
        return sample_tensors(sorted(stored))


class _Less(Derived):
    """A tensor's values less a number."""

    def __init__(self, tensor: LazyTensor, number: float):
        super().__init__(tensor)
        self._number = number

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._tensor[key] - self._number


class _Dequantized:
    """The values of quantized blocks, of the rows that are asked for."""

    def __init__(self, packed: LazyTensor, tensor: GgufTensor):
        self._packed, self._kind, self._shape = packed, tensor.kind, tensor.shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if not isinstance(rows, slice):
            return self[:][key]
        return dequantize_gguf(self._packed[rows], self._kind)[(slice(None), *rest)]
