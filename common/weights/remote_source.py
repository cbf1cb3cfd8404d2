"""``--load-format remote``: safetensors files on a web server, in S3 or in Redis, read in ranges of bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError
from ..config.load_format import LOAD_FORMATS
from ..config.remote import is_remote, open_remote, safetensors_of
from ..config.server import ModelArgs
from .lazy import LazyTensor
from .plain_reads import ReadTensor
from .samples import StoredTensor, tensors_of_header
from .slots import Slot
from .source import SourceTensor, lacks

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
        for tensor in self._stored.values():
            yield SourceTensor(tensor.name, self._tensor(tensor), tensor.file.as_posix())

    def find(self, name: str) -> LazyTensor:
        if name not in self._stored:
            raise lacks(self, name)
        return self._tensor(self._stored[name])

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for file in safetensors_of(self._folder) for tensor in self._header(file)}

    def _header(self, file: str) -> list[StoredTensor]:
        size = int.from_bytes(self._folder.read_range(file, 0, 8), "little")
        try:
            return tensors_of_header(Path(file), size, lambda: self._folder.read_range(file, 8, size))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"Cannot read {self.name}/{file}: {error}.") from None

    def _tensor(self, stored: StoredTensor) -> LazyTensor:
        def fill(view: memoryview, start: int) -> None:
            view[:] = self._folder.read_range(stored.file.as_posix(), stored.start + start, len(view))

        return ReadTensor(stored, fill, reads_columns=False)  # a request for each row would take longer than the row

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        """Covers all tensors' names, types and shapes, and the first bytes of each file's first tensors."""
        facts: list[Any] = []
        for file, tensors in groupby(self._stored.values(), lambda tensor: tensor.file.as_posix()):
            for index, tensor in enumerate(sorted(tensor for tensor in tensors if not is_optional(tensor.name))):
                size = min(_SAMPLE_BYTES, tensor.num_bytes) if index < 4 else 0
                content = self._folder.read_range(file, tensor.start, size)
                facts.append((tensor.name, tensor.dtype, tensor.shape, hashlib.sha256(content).hexdigest()))
        return json.dumps(sorted(facts)).encode()
