"""Weights from files that torch has pickled, as older checkpoints and most EAGLE heads have them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError

import torch

from ..api.errors import ConfigError
from ..config.checkpoint import resolve_checkpoint
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from ..config.weight_files import pickled_files
from .lazy import InMemory, LazyTensor
from .slots import Slot
from .source import SourceTensor, find_among

_SAMPLE_VALUES = 1024


@LOAD_FORMATS.register("pt")
class TorchSource:
    """The .bin or .pt files of the checkpoint that ``args`` name. They are read as tensors only, which runs no code."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        self._folder = resolve_checkpoint(args)
        self.name = str(self._folder)

    @staticmethod
    def finds(args: ModelArgs, folder: Path) -> bool:
        return bool(pickled_files(folder))

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for file in self._files:
            for name, tensor in read_pickled(file).items():
                yield SourceTensor(name, InMemory(tensor), file.name)

    def find(self, name: str) -> LazyTensor:
        return find_among(self, name)

    @cached_property
    def _files(self) -> list[Path]:
        files = pickled_files(self._folder)
        if not files:
            raise ConfigError(f"{self._folder} holds no .bin or .pt files, which --load-format pt reads.")
        return files

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        found = {}
        for name, tensor, _ in self.tensors([]):
            if not is_optional(name):
                values = tensor[...].flatten()[:_SAMPLE_VALUES].contiguous().view(torch.uint8)
                digest = hashlib.sha256(bytes(values.tolist())).hexdigest()
                found[name] = tensor.get_dtype(), tensor.get_shape(), digest
        return json.dumps(sorted(found.items())).encode()


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Maps the tensors of a file; runs no code of it. Raises ConfigError for one that has anything else."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        raise ConfigError(f"Cannot read {file}: {str(error).splitlines()[0] if str(error) else error!r}") from None
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ConfigError(f"Cannot read {file}: it is no dictionary of tensors.")
    return content
