"""Weights from files that torch has pickled, as older checkpoints and most EAGLE heads have them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError

import torch

from ..api.errors import ConfigError
from ..config.checkpoint import resolve_checkpoint
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from .lazy import InMemory, LazyTensor
from .safetensors_source import SafetensorsSource
from .slots import Slot
from .source import SourceTensor, WeightSource

_PATTERN = "*.bin"
_OTHER_FILES = ("training_args.bin", "optimizer.bin", "scheduler.bin")
_SAMPLE_VALUES = 1024


@LOAD_FORMATS.register("pt")
class TorchSource:
    """The .bin files of the checkpoint that ``args`` name. They are read as tensors only, which runs no code."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        self._folder = resolve_checkpoint(args)
        self.name = str(self._folder)

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for file in self._files:
            for name, tensor in _read(file).items():
                yield SourceTensor(name, InMemory(tensor), file.name)

    def find(self, name: str) -> LazyTensor:
        for found, tensor, _ in self.tensors([]):
            if found == name:
                return tensor
        raise ConfigError(f"The checkpoint {self.name} lacks {name}.")

    @cached_property
    def _files(self) -> list[Path]:
        files = bin_files(self._folder)
        if not files:
            raise ConfigError(f"{self._folder} holds no {_PATTERN} files, which --load-format pt reads.")
        return files

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        found = {}
        for name, tensor, _ in self.tensors([]):
            if not is_optional(name):
                values = tensor[...].flatten()[:_SAMPLE_VALUES].contiguous().view(torch.uint8)
                digest = hashlib.sha256(bytes(values.tolist())).hexdigest()
                found[name] = tensor.get_dtype(), tensor.get_shape(), digest
        return json.dumps(sorted(found.items())).encode()


class AutoFormat:
    """Reads safetensors, or torch's files where a checkpoint has these alone."""

    reads_checkpoint = True

    def __call__(self, args: ModelArgs) -> WeightSource:
        pickled = replace(args, load_format="pt")
        if any(resolve_checkpoint(args).glob("*.safetensors")) or not bin_files(resolve_checkpoint(pickled)):
            return SafetensorsSource(args)
        return TorchSource(pickled)


def bin_files(folder: Path) -> list[Path]:
    """Returns the .bin files of a checkpoint that may have weights."""
    return [file for file in sorted(folder.glob(_PATTERN)) if file.name not in _OTHER_FILES]


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        raise ConfigError(f"Cannot read {file}: {str(error).splitlines()[0] if str(error) else error!r}") from None
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ConfigError(f"Cannot read {file}: it is no dictionary of tensors.")
    return content


LOAD_FORMATS.register("auto")(AutoFormat())
