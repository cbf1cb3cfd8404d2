"""Completes a config.json by the defaults of transformers' configuration classes (5.17), which families' files state.

Checkpoints that were written by hand or by other tools leave keys out, and must mean here what they mean there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}
"""Defaults that most families share."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of one number in families and versions of transformers; it is stored under the first."""


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with the defaults of missing keys; a null stays, since it differs from a missing key."""
    filled = {**defaults, **config}
    counts = [config[name] for name in _NUM_EXPERTS if name in config]
    if counts:
        filled["num_experts"] = next(filter(None, counts), None)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        filled["rope_parameters"] = defaults.get("rope_parameters")
    return filled
