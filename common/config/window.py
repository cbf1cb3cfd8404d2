"""What a checkpoint's configuration says about sliding windows, read as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..api.errors import ConfigError

Windows = tuple[int | None, ...]
"""Of each layer: the tokens that it sees, the last one's own included; None for all. No entry at all: no layer has one.
"""

ReadWindows = Callable[[Mapping[str, Any]], Windows]


def in_every_layer(config: Mapping[str, Any]) -> Windows:
    """Mistral's and Mixtral's."""
    return _of(config, [True] * config["num_hidden_layers"], config.get("sliding_window"))


def where_flagged(config: Mapping[str, Any], *, slides: Callable[[int, int], bool]) -> Windows:
    """Qwen's, only with ``use_sliding_window``: in the layers that ``layer_types`` names, else where ``slides(layer,
    max_window_layers)``."""
    if not config["use_sliding_window"]:
        return ()
    last = config["max_window_layers"]
    sliding = [slides(layer, last) for layer in range(config["num_hidden_layers"])]
    return _of(config, _stated(config, sliding), config["sliding_window"])


def in_turns(config: Mapping[str, Any]) -> Windows:
    """gpt-oss's: every second layer from the first on, where ``layer_types`` does not say otherwise."""
    sliding = [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    return _of(config, _stated(config, sliding), config["sliding_window"])


def nowhere(config: Mapping[str, Any]) -> Windows:
    """Of families that have none. Raises ConfigError for a checkpoint that states one: it expects what others do."""
    window = config.get("sliding_window")
    if window is not None and window < config["max_position_embeddings"]:
        raise ConfigError(f"config.json states sliding_window {window}, which models of its architecture do not have: "
                          "set it to null to have every layer see all tokens, as transformers does.")
    return ()


def _stated(config: Mapping[str, Any], otherwise: Sequence[bool]) -> Sequence[bool]:
    kinds = config.get("layer_types")
    if not kinds:
        return otherwise
    known = {"sliding_attention": True, "full_attention": False}
    if len(kinds) != len(otherwise) or not set(kinds) <= set(known):
        raise ConfigError(f"config.json's layer_types must name sliding_attention or full_attention for each of "
                          f"{len(otherwise)} layers; it has {len(kinds)}: {', '.join(map(str, sorted(set(kinds))))}.")
    return [known[kind] for kind in kinds]


def _of(config: Mapping[str, Any], sliding: Sequence[bool], window: int | None) -> Windows:
    if window is None or not any(sliding):
        return ()
    if window < 1:
        raise ConfigError(f"config.json states sliding_window {window}: it must be 1 or more, or null.")
    return tuple(window if slides else None for slides in sliding)
