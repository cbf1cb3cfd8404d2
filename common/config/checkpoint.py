"""Finds a checkpoint's folder, on the disk or from the hub, and reads its JSON files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ..api.errors import ConfigError
from ..api.messages import Pooling
from ..tinychat import packaged_checkpoint
from .description import describe
from .hub import COMMIT, CONSOLIDATED, METADATA_PATTERNS, PICKLED_PATTERNS, WEIGHT_PATTERNS, OnProgress, download
from .load_format import LOAD_FORMATS
from .remote import fetch_metadata, is_remote
from .server import ModelArgs
from .weight_files import is_mistral

_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files with a ``quantization_config``, and the methods that write them: also the first versions of AutoGPTQ and
AutoAWQ."""


def resolve_checkpoint(args: ModelArgs, on_progress: OnProgress | None = None) -> Path:
    """Returns the checkpoint's local folder, after a download from the hub where needed; raises ConfigError.

    ``on_progress`` is called with the share of the weights that is there, while they are downloaded."""
    folder = _local(args)
    if folder is not None:
        return folder
    metadata = download(args.model_path, args.revision, METADATA_PATTERNS, folder=args.download_dir)
    if not LOAD_FORMATS.get(args.load_format).reads_checkpoint:
        return metadata
    weights = PICKLED_PATTERNS if args.load_format == "pt" else WEIGHT_PATTERNS
    return download(args.model_path, metadata.name if COMMIT.fullmatch(metadata.name) else args.revision,
                    (*METADATA_PATTERNS, *weights), on_progress, folder=args.download_dir,
                    without=() if is_mistral(metadata) else (CONSOLIDATED,))


def resolve_metadata(args: ModelArgs) -> Path:
    """Returns a folder with all files but the weights, which are not downloaded; raises ConfigError."""
    return _local(args) or download(args.model_path, args.revision, METADATA_PATTERNS, folder=args.download_dir)


def pin_revision(args: ModelArgs) -> ModelArgs:
    """Sets the revision to the hub's commit, so that all processes load the same one. Raises ConfigError."""
    if _local(args) is not None:
        return args
    commit = resolve_metadata(args).name
    return replace(args, revision=commit) if COMMIT.fullmatch(commit) else args


def _local(args: ModelArgs) -> Path | None:
    """Returns the checkpoint's folder, or its one file; None where --model-path names a repository of the hub. Raises
    ConfigError."""
    name = args.model_path
    if is_remote(name):
        return fetch_metadata(name, args.download_dir)
    packaged = packaged_checkpoint(name)
    folder = packaged or Path(name).expanduser()
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        return folder
    if folder.exists() or packaged or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name[0] in "./~":
        raise ConfigError(f"--model-path {name}: there is no checkpoint folder {folder}.")
    return None


def check_removable(args: ModelArgs) -> None:
    """Raises ConfigError where --delete-ckpt-after-loading would remove others' files: the hub's cache, or Baton's."""
    if is_remote(args.model_path) or packaged_checkpoint(args.model_path) is not None or _local(args) is None:
        raise ConfigError(f"--delete-ckpt-after-loading removes files of a folder that --model-path names, and "
                          f"{args.model_path} is none: leave it out.")


_POOLING_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
"""The poolings by their keys in sentence-transformers' files."""
_MODULES = ("Transformer", "Pooling", "Normalize")


def resolve_pooling(args: ModelArgs, default: Pooling) -> Pooling:
    """Returns ``--pooling``, for auto the checkpoint's own in sentence-transformers' format, else ``default``. Raises
    ConfigError as ``resolve_checkpoint`` does, and for files that ask for more."""
    folder = resolve_metadata(args)
    modules = _modules(folder)
    further = [kind for kind in modules if kind not in _MODULES]
    if further:
        raise ConfigError(f"The checkpoint's modules.json names the module {further[0]}, which is not supported: use a "
                          "checkpoint whose modules.json names Transformer, Pooling and Normalize alone.")
    if args.pooling != "auto":
        return args.pooling
    stated = read_json(folder / modules.get("Pooling", "1_Pooling") / "config.json") or {}
    modes = [key for key, value in stated.items() if key.startswith("pooling_mode_") and value is True]
    if not modes:
        return default
    if len(modes) > 1 or modes[0] not in _POOLING_MODES:
        raise ConfigError(f"The checkpoint's pooling ({', '.join(modes)}) is not supported: give --pooling last, mean "
                          "or cls if one of them is close enough.")
    return cast(Pooling, _POOLING_MODES[modes[0]])


def _modules(folder: Path) -> dict[str, str]:
    """Returns the folders of the modules that sentence-transformers' modules.json names, by the modules' kinds."""
    path = folder / "modules.json"
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        return {module["type"].rpartition(".")[2]: module["path"] for module in stated}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None


def read_config(args: ModelArgs, folder: Path | None = None) -> dict[str, Any] | None:
    """Returns config.json, or what describes the checkpoint in its place, with the values of
    --json-model-override-args, None without the file; raises ConfigError. ``folder`` is the checkpoint's, where it is
    known."""
    path = folder or resolve_metadata(args)
    config = describe(args, path) or read_json(path / "config.json")
    return None if config is None else {**config, **_own_quantization(config, path), **args.config_overrides}


def _own_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the ``quantization_config`` of a checkpoint that has it in a file of its own."""
    for file, method in _QUANTIZATION_FILES.items():
        if not config.get("quantization_config") and (stated := read_json(folder / file)):
            return {"quantization_config": {"quant_method": method, **stated}}
    return {}


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the file's object, None without the file; raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object.")
    return content
