"""Compares a draft model's checkpoint with the speculative algorithm that is to read it, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError
from .checkpoint import read_json, resolve_metadata
from .draft_model import draft_args, naming_draft
from .model import ModelSpec
from .server import ServerConfig

KINDS = {
    "reads_eagle": ("a head of EAGLE", "EAGLE"),
    "reads_eagle3": ("a head of EAGLE-3", "EAGLE3"),
    "reads_mtp": ("a layer of multi-token prediction", "NEXTN"),
    "reads_model": ("a whole model", "STANDALONE"),
}
"""Kinds of draft checkpoints, by the trait of the algorithms that read them: a description, and such an algorithm."""

_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit


def check_draft(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ConfigError where the draft model is not of a kind that --speculative-algorithm reads, as far as its
    config.json and, of a local folder, the names of its tensors tell. ``spec`` is the model's."""
    args = config.speculative
    path, name = args.speculative_draft_model_path, args.speculative_algorithm
    if path in (None, config.model.model_path) and args.has("reads_mtp"):
        if not spec.mtp_layers:
            raise ConfigError(f"--speculative-algorithm {name} drafts by layers of multi-token prediction, and "
                              f"{config.model.model_path} has none (num_nextn_predict_layers of its config.json): "
                              "name a draft model by --speculative-draft-model-path, or leave the flag out.")
        return
    read = {kind for kind in KINDS if args.has(kind)}
    if path is None or not read:
        return
    with naming_draft():
        folder = resolve_metadata(draft_args(config))
    found = _by_names(_tensor_names(folder)) or _by_config(read_json(folder / "config.json") or {})
    if found and not found & read:
        description, fitting = KINDS[min(found)]
        raise ConfigError(f"--speculative-draft-model-path {path} is {description}, which --speculative-algorithm "
                          f"{name} does not read: set --speculative-algorithm {fitting}.")


def _tensor_names(folder: Path) -> set[str]:
    """Returns the names in the folder's safetensors files; none where there are no such files, or broken ones."""
    if (index := read_json(folder / "model.safetensors.index.json")) is not None:
        return set(index.get("weight_map") or ())
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                names.update(json.loads(file.read(size)) if size <= _MOST_HEADER_BYTES else ())
            except ValueError:
                return set()
    return names


def _by_names(names: set[str]) -> set[str]:
    if not names:
        return set()
    own = {name.removeprefix("model.") for name in names}
    if "d2t" in own or any(name.endswith("hidden_norm.weight") for name in own):
        return {"reads_eagle3"}
    if "fc.weight" in own:
        return {"reads_eagle"}
    has_layer = any(name.endswith((".enorm.weight", ".eh_proj.weight")) for name in own)
    if not has_layer:
        return {"reads_model"}
    return {"reads_mtp", "reads_model"} if "norm.weight" in own else {"reads_mtp"}


def _by_config(values: Mapping[str, Any]) -> set[str]:
    """Returns the kinds that a config.json allows; none where it does not tell them apart."""
    named = " ".join(values.get("architectures") or ())
    if "Eagle3" in named or any(values.get(key) for key in ("transformer_layer_config", "draft_vocab_size",
                                                            "eagle_config")):
        return {"reads_eagle3"}
    if "Eagle" in named:
        return {"reads_eagle"}
    return {"reads_mtp", "reads_model"} if values.get("num_nextn_predict_layers") else set()
