"""The safetensors files of a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..api.errors import ConfigError


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint; raises ConfigError where there are none, or one that its index
    names is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"Cannot read {index}: {error!r}.") from None
        files = [folder / name for name in names]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
        # A second copy of the weights, in Mistral's own format.
        files = [file for file in files if not file.name.startswith("consolidated")] or files
    if not files:
        raise ConfigError(f"{folder} holds no safetensors files; --load-format dummy runs without weights.")
    if missing := [file.name for file in files if not file.exists()]:
        raise ConfigError(f"{folder} lacks {first_names(missing)}, which its index names.")
    return files


def first_names(names: Iterable[str]) -> str:
    """Lists the first three names, and how many more there are."""
    listed = sorted(names)
    rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"{', '.join(listed[:3])}{rest}"
