"""Removal of a checkpoint's weights."""

from __future__ import annotations

import logging
from pathlib import Path

from ..config.gguf_file import gguf_files

log = logging.getLogger("baton.weights")

_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.bin.index.json", "*.gguf", "np/*.npy")


def remove_weights(folder: Path) -> None:
    """Removes the files of weights of a folder, or the parts of a GGUF file, which another host of a shared folder may
    have removed; logs what it cannot."""
    files = gguf_files(folder) if folder.suffix == ".gguf" else [
        file for pattern in _PATTERNS for file in folder.glob(pattern)]
    num_bytes = 0
    for file in files:
        try:
            size = file.stat().st_size
            file.unlink()
            num_bytes += size
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s is not removed: %s", file, error)
    log.info("removed %d files of weights, %.2f GiB, from %s", len(files), num_bytes / (1 << 30), folder)
