"""Sliding windows of a checkpoint's layers, read as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import ConfigError


class AttentionChunk(int):
    """Tokens of a chunk: a token attends to those of its own, which begins at a multiple of them, up to itself."""


Windows = tuple[int | None, ...]
"""For each layer the tokens that a token attends to, itself included; None for all. Empty: no layer has a window.
An AttentionChunk is a window, too."""


def forgetting(windows: Windows) -> Windows:
    """Returns the windows behind which pages are given back: none of chunks, whose pages are kept."""
    return tuple(None if isinstance(window, AttentionChunk) else window for window in windows)


def window_of_all_layers(config: Mapping[str, Any]) -> Windows:
    """Reads one window for every layer, as Mistral's and Mixtral's."""
    return window_of_layers(config, [True] * config["num_hidden_layers"])


def window_of_flagged_layers(config: Mapping[str, Any], default: Sequence[bool]) -> Windows:
    """Reads a window for the layers that ``layer_types`` names, else those for which ``default`` is true."""
    return window_of_layers(config, _layer_types(config, default))


def window_of_layers(config: Mapping[str, Any], sliding: Sequence[bool]) -> Windows:
    """Reads ``sliding_window`` for the layers for which ``sliding`` is true."""
    window = config.get("sliding_window")
    if window is None or not any(sliding):
        return ()
    if window < 1:
        raise ConfigError(f"config.json states sliding_window {window}: it must be 1 or more, or null.")
    return tuple(window if slides else None for slides in sliding)


def window_of_alternating_layers(config: Mapping[str, Any], every: int = 2) -> Windows:
    """Reads windows as Gemma's: ``layer_types``, else all layers but every ``every``-th have one."""
    return window_of_flagged_layers(config, [(layer + 1) % every != 0 for layer in range(config["num_hidden_layers"])])


def every_full(config: Mapping[str, Any], default: int) -> Windows:
    """Reads ``layer_types``, else a window for all layers but each ``sliding_window_pattern``-th (``default``)."""
    return window_of_alternating_layers(config, config.get("sliding_window_pattern") or default)


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
