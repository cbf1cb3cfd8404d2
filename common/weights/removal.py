"""Removal of a checkpoint's weights, from the disk or from the system's page cache."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..config.gguf_file import gguf_files

log = logging.getLogger("baton.weights")

_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.bin.index.json", "*.gguf", "np/*.npy")


def remove_weights(folder: Path) -> None:
    """Removes the files of weights of a folder, or the parts of a GGUF file, which another host of a shared folder may
    have removed; logs what it cannot."""
    files, num_bytes = _files(folder), 0
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


def drop_page_cache(folder: Path) -> None:
    """Lets the system forget what it has cached of these files; logs what it cannot."""
    for file in _files(folder):
        try:
            number = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)
        except OSError as error:
            log.warning("%s stays in the page cache: %s", file, error)


def _files(folder: Path) -> list[Path]:
    return gguf_files(folder) if folder.suffix == ".gguf" else [
        file for pattern in _PATTERNS for file in folder.glob(pattern)]
