"""``--load-format auto``: the format of the files that a checkpoint has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ..config.checkpoint import resolve_checkpoint
from ..config.load_format import LOAD_FORMATS, LoadFormat
from ..config.server import ModelArgs
from .source import WeightSource

ORDER = ("remote", "mistral", "safetensors", "pt", "gguf")
"""Formats from the first that is looked for to the last."""


class FoundInFolders(LoadFormat, Protocol):
    """A load format that recognizes its files."""

    def finds(self, args: ModelArgs, folder: Path) -> bool:
        """Returns whether the weights of a checkpoint's folder, or file, are in this format."""


class AutoFormat:
    """Reads the first format that a checkpoint has, of a repository of the hub torch's files where there are no
    others. ``layered`` is the same: whatever the format, a tensor is quantized as it is read, before the next one."""

    reads_checkpoint = True

    def __call__(self, args: ModelArgs) -> WeightSource:
        folder = resolve_checkpoint(args)
        for name in ORDER:
            found: FoundInFolders = LOAD_FORMATS.get(name)  # type: ignore[assignment]
            if found.finds(args, folder):
                return found(replace(args, load_format=name))
        pickled = replace(args, load_format="pt")
        if LOAD_FORMATS.get("pt").finds(pickled, resolve_checkpoint(pickled)):  # type: ignore[attr-defined]
            return LOAD_FORMATS.get("pt")(pickled)
        return LOAD_FORMATS.get("safetensors")(args)


LOAD_FORMATS.register("auto", "layered")(AutoFormat())
