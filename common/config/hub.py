"""Downloads from the Hugging Face hub, and reports their progress."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError

METADATA_PATTERNS = ("*.json", "1_Pooling/*.json", "*.jinja", "*.txt", "*.model")
"""Files that describe a model: all but its weights."""
WEIGHT_PATTERNS = ("*.safetensors",)
PICKLED_PATTERNS = ("*.bin",)
"""Weights of repositories that have no others."""
_IGNORED = ("original/*",)  # gpt-oss's weights a second time
CONSOLIDATED = "consolidated*.safetensors"
"""Mistral's weights a second time, where there is a config.json."""
_LOOK_SECONDS = 0.5

OnProgress = Callable[[float], None]
"""Called with the share of a download that is on the disk, 0 to 1."""
COMMIT = re.compile(r"[0-9a-f]{40}")


def download(name: str, revision: str | None, patterns: Sequence[str], on_progress: OnProgress | None = None, *,
             folder: str | None = None, without: Sequence[str] = ()) -> Path:
    """Returns the local folder of a repository's files that match, but for those that match ``without``, below
    ``folder``, by default the hub's own cache; it is named after the commit. Raises ConfigError."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise ConfigError(f"--model-path {name} is no local folder, and huggingface-hub is not installed to "
                          "download it.") from None
    logging.getLogger("huggingface_hub").handlers.clear()  # its records reach our handlers, and would reach stderr, too
    try:
        with _watched(name, revision, patterns, on_progress, folder) if on_progress else nullcontext():
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), cache_dir=folder,
                                          ignore_patterns=[*_IGNORED, *without]))
    except GatedRepoError:
        reason = "the hub repository is gated: log in with an account that may read it"
    except RevisionNotFoundError:
        reason = f"the hub repository has no revision {revision}"
    except RepositoryNotFoundError:
        reason = "neither a local folder nor a readable hub repository of this name exists"
    except Exception as error:  # the hub's client lets its HTTP library's errors through
        reason = f"the download from the hub failed ({' '.join(str(error).split())[:200] or type(error).__name__})"
    raise ConfigError(f"--model-path {name}: {reason}.")


@contextmanager
def _watched(name: str, revision: str | None, patterns: Sequence[str], on_progress: OnProgress,
             folder: str | None) -> Iterator[None]:
    """Reports a download's progress while the block runs, by the bytes on the disk: they count whichever process and
    protocol of the hub fetches them."""
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(name, revision, patterns, on_progress, stop, folder), daemon=True,
                              name="download-progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(name: str, revision: str | None, patterns: Sequence[str], on_progress: OnProgress,
           stop: threading.Event, folder: str | None) -> None:
    try:
        sizes, blobs = _expected_sizes(name, revision, patterns, folder)
    except Exception:  # the download itself will say what is wrong
        return
    total = sum(sizes.values())
    while total and not stop.wait(_LOOK_SECONDS):
        on_progress(min(_present(blobs, sizes) / total, 1.0))


def _expected_sizes(name: str, revision: str | None, patterns: Sequence[str],
                    folder: str | None) -> tuple[dict[str, int], Path]:
    """Returns each blob's size in bytes by its name, and the folder of blobs in the hub's cache."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # exported lazily

    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=30)
    files: dict[str, Any] = {file.rfilename: file for file in info.siblings or []}
    sizes = {}
    for path in filter_repo_objects(files, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED)):
        file = files[path]
        sizes[file.lfs.sha256 if file.lfs else file.blob_id] = file.size or 0
    return sizes, Path(folder or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


def _present(blobs: Path, sizes: dict[str, int]) -> int:
    """Counts the bytes of these blobs on the disk; an incomplete one (``NAME.….incomplete``) counts in part."""
    present: dict[str, int] = {}
    for path in blobs.iterdir() if blobs.is_dir() else ():
        name = path.name.partition(".")[0]
        if name in sizes:
            try:
                stat = path.stat()
            except FileNotFoundError:  # it was complete just now
                continue
            present[name] = max(present.get(name, 0), min(stat.st_size, stat.st_blocks * 512, sizes[name])
                                if path.name.endswith(".incomplete") else sizes[name])
    return sum(present.values())
