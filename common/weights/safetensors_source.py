"""Weights from a checkpoint's safetensors files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..api.errors import ConfigError
from ..config.checkpoint import resolve_checkpoint
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from ..config.weight_files import has_safetensors
from .files import checkpoint_files
from .lazy import LazyTensor
from .plain_reads import OpenFile, reading_ahead
from .samples import read_header, sample
from .slots import Slot
from .source import SourceTensor, lacks


@LOAD_FORMATS.register("safetensors")
class SafetensorsSource:
    """The safetensors files of the checkpoint that ``args`` name."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        self._folder = resolve_checkpoint(args)
        self.name = str(self._folder)
        self._maps, self._threads = not args.weight_loader_disable_mmap, args.loader_threads

    @staticmethod
    def finds(args: ModelArgs, folder: Path) -> bool:
        return has_safetensors(folder)

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        files = checkpoint_files(self._folder)
        with reading_ahead(files, self._threads) as begin:
            for file in files:
                begin(file)
                try:
                    yield from self._tensors(file)
                except (OSError, SafetensorError) as error:
                    raise ConfigError(f"Cannot read {file}: {error}.") from None

    def _tensors(self, file: Path) -> Iterator[SourceTensor]:
        if not self._maps:
            opened = OpenFile(file)
            for tensor in read_header(file):
                yield SourceTensor(tensor.name, opened.tensor(tensor), file.name)
            return
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 (the file is no mapping)
                yield SourceTensor(name, content.get_slice(name), file.name)

    def find(self, name: str) -> LazyTensor:
        if name not in self._files:
            raise lacks(self, name)
        with safe_open(self._files[name], framework="pt") as content:
            found: LazyTensor = content.get_slice(name)
            return found

    @functools.cached_property
    def _files(self) -> dict[str, Path]:
        """Each tensor's file."""
        return {name: file for file in checkpoint_files(self._folder) for name in _names(file)}

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        return sample(self._folder, is_optional)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as content:
        return list(content.keys())
