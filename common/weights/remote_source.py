"""``--load-format remote``: safetensors files on a web server, in S3 or in Redis, read in ranges of bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..api.errors import ConfigError
from ..config.load_format import LOAD_FORMATS
from ..config.remote import RemoteFolder, is_remote, open_remote, safetensors_of
from ..config.server import ModelArgs
from .lazy import DTYPES, LazyTensor
from .samples import StoredTensor, tensors_of_header
from .slots import Slot
from .source import SourceTensor

_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_SAMPLE_BYTES = 1024


@LOAD_FORMATS.register("remote")
class RemoteSource:
    """The safetensors files of the folder on a network that ``args`` name. Ranks read the rows that they need."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        self.name = args.model_path
        if not is_remote(args.model_path):
            raise ConfigError(f"--load-format remote reads a --model-path such as https://…, s3://… or redis://…, not "
                              f"{args.model_path}.")
        self._folder = open_remote(args.model_path)

    @staticmethod
    def finds(args: ModelArgs, folder: Path) -> bool:
        return is_remote(args.model_path)

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for file in safetensors_of(self._folder):
            for tensor in self._header(file):
                yield SourceTensor(tensor.name, _RemoteTensor(self._folder, tensor), file)

    def _header(self, file: str) -> list[StoredTensor]:
        size = int.from_bytes(self._folder.read_range(file, 0, 8), "little")
        try:
            return tensors_of_header(Path(file), size, lambda: self._folder.read_range(file, 8, size))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"Cannot read {self.name}/{file}: {error}.") from None

    def find(self, name: str) -> LazyTensor:
        for found, tensor, _ in self.tensors(()):
            if found == name:
                return tensor
        raise ConfigError(f"The checkpoint {self.name} lacks {name}.")

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        """Covers all tensors' names, types and shapes, and the first bytes of each file's first tensors."""
        facts: list[Any] = []
        for file in safetensors_of(self._folder):
            stored = sorted(tensor for tensor in self._header(file) if not is_optional(tensor.name))
            for index, tensor in enumerate(stored):
                size = min(_SAMPLE_BYTES, tensor.num_bytes) if index < 4 else 0
                content = self._folder.read_range(file, tensor.start, size)
                facts.append((tensor.name, tensor.dtype, tensor.shape, hashlib.sha256(content).hexdigest()))
        return json.dumps(sorted(facts)).encode()


class _RemoteTensor:
    """A LazyTensor of a file on a network: a slice reads its rows."""

    def __init__(self, folder: RemoteFolder, tensor: StoredTensor):
        self._folder, self._tensor = folder, tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._tensor.dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        shape = self._tensor.shape
        rows, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if not shape or not isinstance(rows, slice) or rows.step not in (None, 1):
            return self._read(0, shape[0] if shape else 1).view(shape)[key]
        start, stop, _ = rows.indices(shape[0])
        return self._read(start, max(start, stop))[(slice(None), *rest)]

    def _read(self, start: int, stop: int) -> torch.Tensor:
        dtype, inner = _TYPES[self._tensor.dtype], self._tensor.shape[1:]
        row_bytes = math.prod(inner) * dtype.itemsize
        content = self._folder.read_range(self._tensor.file.as_posix(), self._tensor.start + start * row_bytes,
                                          (stop - start) * row_bytes)
        if not content:
            return torch.empty((stop - start, *inner), dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(stop - start, *inner)
