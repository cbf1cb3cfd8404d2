"""Where a checkpoint's files are, and its JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from ..api.errors import ConfigError
from .server import ModelArgs


def resolve_checkpoint(args: ModelArgs) -> Path:
    """The checkpoint's local folder, downloaded from the hub where needed; raises ConfigError."""
    name = args.model_path
    if name == "tinychat":
        from ..tinychat import CHECKPOINT
        folder = Path(CHECKPOINT)
    else:
        folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name == "tinychat" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name[0] in "./~":
        raise ConfigError(f"--model-path {name}: there is no checkpoint folder {folder}.")
    return _download(args)


def pooling_of(args: ModelArgs) -> Literal["last", "mean"]:
    """``--pooling``, or what the checkpoint says in sentence-transformers' form; raises ConfigError as
    ``resolve_checkpoint`` does."""
    if args.pooling != "auto":
        return args.pooling
    found = read_json(resolve_checkpoint(args) / "1_Pooling" / "config.json") or {}
    return "mean" if found.get("pooling_mode_mean_tokens") else "last"


def _download(args: ModelArgs) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise ConfigError(f"--model-path {args.model_path} is no local folder, and huggingface-hub is not "
                          f"installed to download it.") from None
    patterns = ["*.json", "1_Pooling/*.json", "*.jinja", "*.txt", "*.model"]
    if args.load_format != "dummy":
        patterns.append("*.safetensors")
    try:
        return Path(snapshot_download(args.model_path, revision=args.revision, allow_patterns=patterns,
                                      ignore_patterns=["original/*"]))  # gpt-oss's weights a second time
    except GatedRepoError:
        reason = "the hub repository is gated: log in with an account that may read it"
    except RevisionNotFoundError:
        reason = f"the hub repository has no revision {args.revision}"
    except RepositoryNotFoundError:
        reason = "neither a local folder nor a readable hub repository of this name exists"
    except (OSError, ValueError) as error:
        reason = f"the download from the hub failed ({' '.join(str(error).split())[:200]})"
    raise ConfigError(f"--model-path {args.model_path}: {reason}.")


def read_json(path: Path) -> dict[str, Any] | None:
    """The file's object, None without the file; raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return content
