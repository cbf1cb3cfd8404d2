"""The placement of experts at start: by the tokens that a record counted, or as a map says."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..api.errors import ConfigError
from ..config.server import ParallelArgs
from ..layers.moe import MoE
from ..models.decoder.causal_lm import CausalLM
from .eplb import expert_layers

log = logging.getLogger("baton.engine")

_FLAG = "--init-expert-location"


def place_experts(args: ParallelArgs, model: CausalLM) -> None:
    """Moves the experts of all layers to where --init-expert-location says. A collective of all ranks, before there are
    steps; raises ConfigError where the location is not one of this model."""
    if args.ep_dispatch_algorithm == "fake":
        log.warning("FAKE ROUTING: experts compute tokens in turn, and answers are wrong; leave "
                    "--ep-dispatch-algorithm fake out but for measurements")
    if args.init_expert_location == "trivial":
        return
    layers = expert_layers(model)
    content = _read(args.init_expert_location)
    if "physical_to_logical_map" in content:
        rows = _rows(content, "physical_to_logical_map", list(layers), len(model.layers))
        placements = {index: _checked(layer, rows[index]) for index, layer in layers.items()}
        moved = sum(layer.place(placements[index]) for index, layer in layers.items())
    else:
        rows = _rows(content, "logical_count", list(layers), len(model.layers))
        for index, layer in layers.items():
            assert layer.placement is not None
            if rows[index].shape != (len(layer.placement.replica_counts),) or rows[index].min() < 0:
                raise ConfigError(f"{_FLAG}: logical_count must have a number of tokens for each of the model's "
                                  f"{len(layer.placement.replica_counts)} experts in each layer.")
        moved = sum(layer.rebalance(rows[index][None]) for index, layer in layers.items())
    log.info("experts are placed as %s says: %d came from other ranks", _FLAG, moved)


def _read(value: str) -> Mapping[str, Any]:
    """Returns the content of a file, or of JSON on the command line."""
    try:
        if value.lstrip().startswith("{"):
            found = json.loads(value)
        elif value.endswith((".pt", ".pth")):
            found = torch.load(value, map_location="cpu", weights_only=True)
        elif value.endswith(".json"):
            found = json.loads(Path(value).read_text(encoding="utf-8"))
        else:
            raise ConfigError(f"{_FLAG} must be trivial, JSON, or a file that ends in .json or .pt, not {value!r}.")
    except OSError as error:
        raise ConfigError(f"Cannot read {_FLAG} {value}: {error.strerror}.") from None
    except ConfigError:
        raise
    except Exception as error:  # torch's own errors of unpickling, and those of json
        raise ConfigError(f"Cannot read {_FLAG} {value}: {type(error).__name__}.") from None
    if not isinstance(found, Mapping) or not {"physical_to_logical_map", "logical_count"} & found.keys():
        raise ConfigError(f"{_FLAG} must have a physical_to_logical_map or a logical_count.")
    return found


def _rows(content: Mapping[str, Any], name: str, wanted: list[int], num_layers: int) -> dict[int, np.ndarray]:
    """Returns the row of each layer ``wanted``: those with experts, by ``layers`` where given, or of all layers."""
    try:
        found = np.asarray(content[name], np.int64)
        named = [int(layer) for layer in content["layers"]] if "layers" in content else None
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{_FLAG}: {name} must be an array of whole numbers, with a row for each layer.") from None
    if found.ndim == 3 and name == "logical_count":  # of several steps
        found = found.sum(0)
    if named is None:
        named = list(range(num_layers)) if len(found) == num_layers else wanted
    if found.ndim != 2 or len(named) != len(found) or not set(wanted) <= set(named):
        raise ConfigError(f"{_FLAG}: {name} must have a row for each of the model's {num_layers} layers, or of its "
                          f"{len(wanted)} layers with experts.")
    return dict(zip(named, found))


def _checked(layer: MoE, row: np.ndarray) -> np.ndarray:
    """Returns a layer's map [ranks, experts of a rank]. Raises ConfigError where it is none of the layer's."""
    assert layer.placement is not None
    shape, num_experts = layer.placement.physical_to_logical.shape, len(layer.placement.replica_counts)
    if row.size != shape[0] * shape[1]:
        raise ConfigError(f"{_FLAG}: physical_to_logical_map must have {shape[0] * shape[1]} experts in each layer, "
                          f"with --ep-num-redundant-experts, not {row.size}.")
    placed = row.reshape(shape)
    if set(row.tolist()) != set(range(num_experts)) or any(len(set(own)) < len(own) for own in placed.tolist()):
        raise ConfigError(f"{_FLAG}: physical_to_logical_map must have each of the model's {num_experts} experts, and "
                          "none twice on a rank.")
    return placed
