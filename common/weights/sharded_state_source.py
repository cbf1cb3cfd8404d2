"""``--load-format sharded_state``: files that each rank of a running server has written, of its own parts of tensors.

A rank of a server with the same parallel sizes reads what one rank wrote; with other sizes it reads its parts from
several ranks' files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..api.errors import ConfigError, InvalidRequest
from ..config.checkpoint import resolve_checkpoint
from ..config.hub import METADATA_PATTERNS
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from .lazy import LazyTensor
from .plain_reads import OpenFile
from .samples import read_header, sample_tensors
from .slots import Slot
from .source import SourceTensor, lacks

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
_FILE = re.compile(r".*rank-\d+.*part-\d+.*\.safetensors")
_SHARDS = "shards"
"""The key of a file's metadata with each tensor's whole shape, the dimension along which it is cut, and where it
begins."""


@dataclass
class _Whole:
    """A LazyTensor of parts that ranks have written."""

    shape: tuple[int, ...]
    dim: int
    file: str
    parts: dict[int, LazyTensor] = field(default_factory=dict)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return next(iter(self.parts.values())).get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        keys = list(key) if isinstance(key, tuple) else [] if key is Ellipsis else [key]
        if not self.shape or not all(isinstance(each, slice) for each in keys):
            return self._range(0, self.shape[self.dim] if self.shape else 1, [])[key]
        keys += [slice(None)] * (self.dim + 1 - len(keys))
        start, stop, _ = keys[self.dim].indices(self.shape[self.dim])
        return self._range(start, stop, keys)

    def _range(self, start: int, stop: int, keys: list[slice]) -> torch.Tensor:
        """Reads a range along ``dim``, from the parts that have it."""
        if not self.shape:
            return self.parts[0][...]
        found: list[torch.Tensor] = []
        at = start
        keys = keys or [slice(None)] * (self.dim + 1)
        while at < stop or not found:
            first = max((first for first in self.parts if first <= at), default=None)
            size = 0 if first is None else self.parts[first].get_shape()[self.dim]
            if first is None or (at >= first + size and stop > start):
                raise ConfigError(f"The files of ranks lack a part of a tensor of {self.file}: save them again.")
            end = min(stop, first + size)
            own = (*keys[:self.dim], slice(at - first, end - first), *keys[self.dim + 1:])
            found.append(self.parts[first][own])
            at = end
            if stop <= start:
                break
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


@LOAD_FORMATS.register("sharded_state")
class ShardedStateSource:
    """The files that ``/save_sharded_model`` wrote to the folder that ``args`` name."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        self._folder = resolve_checkpoint(args)
        self.name = str(self._folder)

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for name, tensor in self._read().items():
            yield SourceTensor(name, tensor, tensor.file)

    def find(self, name: str) -> LazyTensor:
        found = self._read()
        if name not in found:
            raise lacks(self, name)
        return found[name]

    def _files(self) -> list[Path]:
        files = [file for file in sorted(self._folder.glob("*.safetensors")) if _FILE.fullmatch(file.name)]
        if not files:
            raise ConfigError(f"{self._folder} holds no files of ranks ({PATTERN}), which --load-format sharded_state "
                              "reads: let a running server write them by /save_sharded_model.")
        return files

    def _read(self) -> dict[str, _Whole]:
        """Reads the headers of all files."""
        found: dict[str, _Whole] = {}
        for file in self._files():
            try:
                with safe_open(file, framework="pt") as content:
                    shards = json.loads((content.metadata() or {})[_SHARDS])
                opened = OpenFile(file)
                for tensor in read_header(file):
                    shape, dim, start = shards[tensor.name]
                    whole = found.setdefault(tensor.name, _Whole(tuple(shape), dim, file.name))
                    whole.parts.setdefault(start, opened.tensor(tensor))
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"Cannot read {file} as a rank's file: {error!r}.") from None
        return found

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        stored = [tensor for file in self._files() for tensor in read_header(file) if not is_optional(tensor.name)]
        return sample_tensors(sorted(tensor._replace(name=f"{tensor.file.name}/{tensor.name}") for tensor in stored))


@torch.no_grad()
def save_sharded(slots: Iterable[Slot], folder: Path, rank: int, pattern: str, max_bytes: int,
                 metadata: Path | None) -> int:
    """Writes a rank's parts of all tensors to files of at most ``max_bytes`` (a larger tensor has one of its own), and
    with ``metadata``, the checkpoint's folder, its files that are no weights. Returns the bytes of the tensors. Raises
    InvalidRequest for weights that are not held as the checkpoint has them, and a folder that cannot be written."""
    kept = [slot for slot in slots if slot.target.numel()]
    for slot in kept:
        if slot.load is not None or slot.finish is not None:
            raise InvalidRequest(f"{slot.name} is quantized or repacked: such weights are not saved. Start the server "
                                 "without --quantization, or copy the checkpoint.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part, tensors = 0, dict[str, torch.Tensor]()
        shards: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for slot in kept:
            content = slot.content().detach().cpu().contiguous()
            if tensors and sum(tensor.nbytes for tensor in tensors.values()) + content.nbytes > max_bytes:
                _write(folder / pattern.format(rank=rank, part=part), tensors, shards)
                part, tensors, shards = part + 1, {}, {}
            tensors[slot.name], shards[slot.name] = content, (slot.shape, slot.dim, slot.start)
        _write(folder / pattern.format(rank=rank, part=part), tensors, shards)
        if metadata is not None:
            _copy_metadata(metadata, folder)
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(f"Cannot write {folder}: {error}.", param="path") from None
    return sum(slot.target.nbytes for slot in kept)


def _copy_metadata(source: Path, target: Path) -> None:
    """Copies the files of a checkpoint that are no weights, and are not there."""
    for pattern in METADATA_PATTERNS:
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            if not copy.exists() and not file.name.endswith(".index.json"):
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)


def _write(file: Path, tensors: dict[str, torch.Tensor], shards: dict[str, tuple[tuple[int, ...], int, int]]) -> None:
    save_file(tensors, file, metadata={"format": "pt", _SHARDS: json.dumps(shards)})
