"""Weights from files that torch has pickled, by way of a copy with one file of numpy's a tensor, which is mapped."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..api.errors import ConfigError
from ..config.checkpoint import resolve_checkpoint
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from ..config.weight_files import pickled_files
from .lazy import DTYPES, TYPES, LazyTensor
from .samples import StoredTensor, sample_tensors
from .slots import Slot
from .source import SourceTensor, lacks
from .torch_source import read_pickled

_FOLDER = "np"
_INDEX = "tensors.json"
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""numpy's types of values by their bytes: it has no bfloat16, and no float8."""


@LOAD_FORMATS.register("npcache")
class NumpyCacheSource:
    """A copy of the .bin or .pt files of the checkpoint that ``args`` name, in its folder ``np``. The first process
    that needs it writes it; it is written again where the files have changed."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        self._folder = resolve_checkpoint(args)
        self.name = str(self._folder)

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for name in self._index:
            yield SourceTensor(name, self.find(name), f"{_FOLDER}/{name}.npy")

    def find(self, name: str) -> LazyTensor:
        if name not in self._index:
            raise lacks(self, name)
        return _MappedTensor(self._folder / _FOLDER / f"{name}.npy", self._index[name])

    @cached_property
    def _index(self) -> dict[str, str]:
        """Each tensor's type; writes the copy where it is missing. Raises ConfigError."""
        files = pickled_files(self._folder)
        if not files:
            raise ConfigError(f"{self._folder} holds no .bin or .pt files, which --load-format npcache copies.")
        stamp = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
        target = self._folder / _FOLDER
        try:
            target.mkdir(exist_ok=True)
            with (target / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = _read_index(target / _INDEX)
                if found.get("files") != stamp:
                    found = {"files": stamp, "types": _write(files, target)}
                    (target / _INDEX).write_text(json.dumps(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--load-format npcache cannot write {target} ({error.strerror or error}): make it "
                              "writable, or use --load-format pt.") from None
        types: dict[str, str] = found["types"]
        return types

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        stored = []
        for name, dtype in sorted(self._index.items()):
            if not is_optional(name):
                file = self._folder / _FOLDER / f"{name}.npy"
                values = np.load(file, mmap_mode="r")
                start = file.stat().st_size - values.nbytes
                stored.append(StoredTensor(name, dtype, values.shape, file, start, values.nbytes))
        return sample_tensors(stored)


def _read_index(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(files: Sequence[Path], target: Path) -> dict[str, str]:
    """Writes all tensors of the files; returns their types."""
    types = {}
    for file in files:
        for name, tensor in read_pickled(file).items():
            if os.sep in name:
                raise ConfigError(f"{file} has a tensor {name!r}, which can be no file's name: use --load-format pt.")
            words = _WORDS[tensor.itemsize]
            whole = tensor.detach().contiguous().view(torch.uint8).flatten() if tensor.ndim else tensor.reshape(1).view(
                torch.uint8)
            np.save(target / f"{name}.npy", whole.numpy().view(words).reshape(tuple(tensor.shape)))
            types[name] = DTYPES[tensor.dtype]
    return types


class _MappedTensor:
    """A tensor of a mapped file: a slice reads that part alone."""

    def __init__(self, file: Path, dtype: str):
        try:
            self._values = np.load(file, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(f"Cannot read {file}: {error}.") from None
        self._dtype = dtype

    def get_shape(self) -> list[int]:
        return list(self._values.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        part = np.array(self._values[key])  # a copy: torch's tensors are writable
        whole = torch.from_numpy(part.reshape(-1).view(np.uint8)).view(TYPES[self._dtype])
        return whole.view(part.shape)
