"""Comparison of a checkpoint's files with SHA-256 sums (--model-checksum)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..api.errors import ConfigError
from ..config.server import ModelArgs

_THREADS = 8  # OpenSSL releases the interpreter's lock; one thread reads 1 to 2 GB/s


class Sum(NamedTuple):
    """A file's expected sum: ``sha256`` of its content, or ``git`` of it as git names blobs."""

    kind: str
    value: str


def verify_checkpoint(args: ModelArgs, folder: Path, progress: Callable[[float], None]) -> None:
    """Compares the files of a checkpoint's folder with those of --model-checksum; calls ``progress`` with the share
    that is done. Raises ConfigError where one differs, or one of a file's list is missing."""
    if args.model_checksum is None:
        return
    source = args.model_checksum or args.model_path
    listed = Path(source).expanduser().is_file()
    expected = _listed(Path(source).expanduser()) if listed else _of_hub(source, None if args.model_checksum
                                                                         else args.revision)
    if missing := sorted(name for name in expected if not (folder / name).is_file()):
        if listed:
            raise ConfigError(f"--model-checksum {source} names files that {folder} does not have: "
                              f"{', '.join(missing[:3])}.")
        expected = {name: each for name, each in expected.items() if name not in missing}  # not all are downloaded
    if not expected:
        raise ConfigError(f"--model-checksum {source} names no file of {folder}.")
    names, done = sorted(expected, key=lambda name: -(folder / name).stat().st_size), 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, found in zip(names, pool.map(lambda name: _sum(folder / name, expected[name].kind), names)):
            if found != expected[name].value:
                pool.shutdown(cancel_futures=True)
                raise ConfigError(f"{folder / name} is not the file of --model-checksum {source}: its sum is "
                                  f"{found[:16]}…, not {expected[name].value[:16]}…; copy it again.")
            done += 1
            progress(done / len(names))


def _listed(path: Path) -> dict[str, Sum]:
    """Reads a list of sums: a JSON object of names and sums, or one that has it as ``checksums``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sums = found.get("checksums", found)
        return {str(name): Sum("sha256", value.lower()) for name, value in sums.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--model-checksum {path} must be a JSON file as {{\"checksums\": {{\"model.safetensors\": "
                          f"\"…\"}}}}: {error}.") from None


def _of_hub(name: str, revision: str | None) -> dict[str, Sum]:
    """Asks the hub for the sums of a repository's files."""
    try:
        from huggingface_hub import HfApi

        files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    except Exception as error:  # the hub's client lets its HTTP library's errors through
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"--model-checksum {name} is neither a file, nor can the hub be asked for it: "
                          f"{reason}.") from None
    sums = {each.rfilename: Sum("git", each.blob_id) for each in files if each.blob_id}
    return sums | {each.rfilename: Sum("sha256", each.lfs.sha256) for each in files if each.lfs}


def _sum(path: Path, kind: str) -> str:
    made = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            made.update(chunk)
    return made.hexdigest()
