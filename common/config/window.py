"""Sliding windows of a checkpoint's layers, read as transformers reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..api.errors import ConfigError

Windows = tuple[int | None, ...]
"""For each layer the tokens that a token attends to, itself included; None for all. Empty: no layer has a window."""

ReadWindows = Callable[[Mapping[str, Any]], Windows]


def window_of_all_layers(config: Mapping[str, Any]) -> Windows:
    """Reads Mistral's and Mixtral's: the same window in every layer."""
    return _per_layer(config, [True] * config["num_hidden_layers"], config.get("sliding_window"))


def window_of_flagged_layers(config: Mapping[str, Any], *, slides: Callable[[int, int], bool]) -> Windows:
    """Reads Qwen's, with ``use_sliding_window`` only: the layers that ``layer_types`` names, else those for which
    ``slides(layer, max_window_layers)``."""
    if not config["use_sliding_window"]:
        return ()
    last = config["max_window_layers"]
    sliding = [slides(layer, last) for layer in range(config["num_hidden_layers"])]
    return _per_layer(config, _layer_types(config, sliding), config["sliding_window"])


def window_of_alternating_layers(config: Mapping[str, Any]) -> Windows:
    """Reads gpt-oss's: every second layer from the first on, unless ``layer_types`` says otherwise."""
    sliding = [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    return _per_layer(config, _layer_types(config, sliding), config["sliding_window"])


def no_window(config: Mapping[str, Any]) -> Windows:
    """Reads families without windows. Raises ConfigError for a checkpoint that states one."""
    window = config.get("sliding_window")
    if window is not None and window < config["max_position_embeddings"]:
        raise ConfigError(f"config.json states sliding_window {window}, which models of its architecture do not have: "
                          "set it to null to have every layer see all tokens, as transformers does.")
    return ()


def _layer_types(config: Mapping[str, Any], default: Sequence[bool]) -> Sequence[bool]:
    kinds = config.get("layer_types")
    if not kinds:
        return default
    known = {"sliding_attention": True, "full_attention": False}
    if len(kinds) != len(default) or not set(kinds) <= set(known):
        raise ConfigError(f"config.json's layer_types must name sliding_attention or full_attention for each of "
                          f"{len(default)} layers; it has {len(kinds)}: {', '.join(map(str, sorted(set(kinds))))}.")
    return [known[kind] for kind in kinds]


def _per_layer(config: Mapping[str, Any], sliding: Sequence[bool], window: int | None) -> Windows:
    if window is None or not any(sliding):
        return ()
    if window < 1:
        raise ConfigError(f"config.json states sliding_window {window}: it must be 1 or more, or null.")
    return tuple(window if slides else None for slides in sliding)
