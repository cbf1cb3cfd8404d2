"""Checkpoints in the form of a family's own code, made of a model of transformers that computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def repack(folder: Path, change: Callable[[Tensors], Tensors], config: Mapping[str, Any], *,
           drop: tuple[str, ...] = ()) -> None:
    """Replaces the tensors of the checkpoint in ``folder`` by what ``change`` makes of them, and adds ``config`` to its
    config.json, without the keys ``drop``."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path, {"format": "pt"})
    change_config(folder, config, drop=drop)


def change_config(folder: Path, changes: Mapping[str, Any], *, drop: tuple[str, ...] = ()) -> None:
    """Writes fields of a checkpoint's config.json, and leaves out the keys ``drop``."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in drop}))


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Returns tensors with each part ``names`` of their names replaced, in order."""
    result = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        result[name] = tensor
    return result


def fused(tensors: Tensors, parts: tuple[str, ...], into: str, heads: tuple[int, ...] = ()) -> Tensors:
    """Returns tensors with the modules ``parts`` of each layer as one module ``into``: one after the other, or, with
    the number of ``heads`` of each, as many groups as the last part has heads."""
    result = {name: tensor for name, tensor in tensors.items() if not any(f".{part}." in name for part in parts)}
    for name in [name for name in tensors if f".{parts[0]}." in name]:
        whole = [tensors[name.replace(f".{parts[0]}.", f".{part}.")] for part in parts]
        if heads:
            whole = [tensor.unflatten(0, (heads[-1], -1)) for tensor in whole]
            result[name.replace(parts[0], into)] = torch.cat(whole, 1).flatten(0, 1)
        else:
            result[name.replace(parts[0], into)] = torch.cat(whole)
    return result
