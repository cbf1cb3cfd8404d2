"""A checkpoint's safetensors files, and the tensors in them."""

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
from .interleaved_experts import by_expert_in_turns


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; raises ConfigError where there are none, or some that its index names."""
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
    if absent := [file.name for file in files if not file.exists()]:
        raise ConfigError(f"{folder} lacks {some(absent)}, which its index names.")
    return files


def tensors_of(file: Path, stacked: Stacked = "rows") -> Iterator[tuple[str, Any]]:
    """Names and lazy slices, experts' one by one, who are ``stacked`` as MoESpec says; raises ConfigError for a file
    that cannot be read."""
    try:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 (the file is no mapping)
                source = content.get_slice(name)
                if stacked == "interleaved":
                    yield from by_expert_in_turns(name, source, partial(_find, file))
                else:
                    yield from by_expert(name, source)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from None


def _find(file: Path, name: str) -> Any:
    """The lazy slice of a tensor of this file or of another one beside it; raises ConfigError where there is none."""
    for other in (file, *sorted(file.parent.glob("*.safetensors"))):
        with safe_open(other, framework="pt") as content:
            if name in content.keys():  # noqa: SIM118
                return content.get_slice(name)
    raise ConfigError(f"The checkpoint {file.parent} lacks {name}.")


def some(names: Iterable[str]) -> str:
    """The first three, and how many more."""
    listed = sorted(names)
    rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"{', '.join(listed[:3])}{rest}"
