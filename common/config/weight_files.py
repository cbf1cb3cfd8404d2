"""Files of weights in a checkpoint's folder, by their names."""

from __future__ import annotations

from pathlib import Path

_PICKLED = ("*.bin", "*.pt")
_OTHER_FILES = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt")


def pickled_files(folder: Path) -> list[Path]:
    """Returns the files of a checkpoint that torch may have pickled weights to: .bin, or where there are none .pt."""
    for pattern in _PICKLED:
        if found := [file for file in sorted(folder.glob(pattern)) if file.name not in _OTHER_FILES]:
            return found
    return []


def is_mistral(folder: Path) -> bool:
    """Returns whether a folder has a checkpoint in Mistral's own format alone."""
    return (folder / "params.json").exists() and not (folder / "config.json").exists()


def has_safetensors(folder: Path) -> bool:
    """Returns whether a folder has any file in safetensors."""
    return next(folder.glob("*.safetensors"), None) is not None
