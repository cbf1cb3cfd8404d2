"""Reads a checkpoint's safetensors files and the tensors in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..api.errors import ConfigError
from ..config.moe import Stacked
from .expert_names import by_expert
from .interleaved_experts import by_interleaved_expert


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
    if not files:
        raise ConfigError(f"{folder} holds no safetensors files; --load-format dummy runs without weights.")
    if missing := [file.name for file in files if not file.exists()]:
        raise ConfigError(f"{folder} lacks {first_names(missing)}, which its index names.")
    return files


def tensors_of(file: Path, stacked: Stacked = "rows") -> Iterator[tuple[str, Any]]:
    """Yields names and lazy slices of a file's tensors, experts' one by one; ``stacked`` is MoESpec's. Raises
    ConfigError for a file that cannot be read."""
    try:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 (the file is no mapping)
                source = content.get_slice(name)
                if stacked == "interleaved":
                    yield from by_interleaved_expert(name, source, partial(_find, file))
                else:
                    yield from by_expert(name, source)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from None


def _find(file: Path, name: str) -> Any:
    """Returns the lazy slice of a tensor of this file or of another one in its folder; raises ConfigError where there
    is none."""
    for other in (file, *sorted(file.parent.glob("*.safetensors"))):
        with safe_open(other, framework="pt") as content:
            if name in content.keys():  # noqa: SIM118
                return content.get_slice(name)
    raise ConfigError(f"The checkpoint {file.parent} lacks {name}.")


def first_names(names: Iterable[str]) -> str:
    """Lists the first three names, and how many more there are."""
    listed = sorted(names)
    rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"{', '.join(listed[:3])}{rest}"
