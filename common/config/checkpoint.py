"""Where a checkpoint's files are, and its JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..api.errors import ConfigError
from .hub import COMMIT, FACTS, WEIGHTS, Told, download
from .server import ModelArgs


def resolve_checkpoint(args: ModelArgs, told: Told | None = None) -> Path:
    """The checkpoint's local folder, downloaded from the hub where needed; raises ConfigError. ``told`` follows the
    download of the weights."""
    folder = _local(args)
    if folder is not None:
        return folder
    facts = download(args.model_path, args.revision, FACTS)
    if args.load_format == "dummy":
        return facts
    return download(args.model_path, facts.name if COMMIT.fullmatch(facts.name) else args.revision,
                    (*FACTS, *WEIGHTS), told)


def resolve_facts(args: ModelArgs) -> Path:
    """A folder with all but the weights, which are not downloaded; raises ConfigError."""
    return _local(args) or download(args.model_path, args.revision, FACTS)


def pinned(args: ModelArgs) -> ModelArgs:
    """With the hub's commit as revision, so that all processes load the same one. Raises ConfigError."""
    if _local(args) is not None:
        return args
    commit = resolve_facts(args).name
    return replace(args, revision=commit) if COMMIT.fullmatch(commit) else args


def _local(args: ModelArgs) -> Path | None:
    """The checkpoint's folder; None where --model-path names a repository of the hub. Raises ConfigError."""
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
    return None


def pooling_of(args: ModelArgs) -> Literal["last", "mean"]:
    """``--pooling``, or what the checkpoint says in sentence-transformers' form; raises ConfigError as
    ``resolve_checkpoint`` does."""
    if args.pooling != "auto":
        return args.pooling
    found = read_json(resolve_facts(args) / "1_Pooling" / "config.json") or {}
    return "mean" if found.get("pooling_mode_mean_tokens") else "last"


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
