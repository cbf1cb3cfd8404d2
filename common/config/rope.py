"""Rotary position embeddings, as a checkpoint's configuration describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLDER_NAMES = {"su": "longrope"}


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embeddings, named as transformers names them.

    ``rope_scaling`` is None for plain ones, else a dict with ``rope_type`` and that type's parameters. "longrope"
    (arXiv:2402.13753) divides each frequency by its own factor: of ``long_factor`` where the engine's context is longer
    than ``original_max_position_embeddings``, else of ``short_factor``. So keys do not depend on what follows them.
    ``max_position_embeddings`` is the trained context, in tokens. Only the first ``partial_rotary_factor`` of a head's
    values are rotated.
    """

    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    partial_rotary_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many values of a head of ``head_dim`` are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def longest_context(self) -> int:
        """The longest context in tokens. Llama 3's trained context includes the scaling, and yarn's may."""
        scaling, positions = self.rope_scaling, self.max_position_embeddings
        kind = scaling["rope_type"] if scaling else "default"
        if scaling and kind in ("linear", "dynamic"):
            return int(positions * scaling["factor"])
        if scaling and kind == "yarn":
            return max(positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
        return positions


def read_rope(config: Mapping[str, Any], *, may_be_partial: bool = False) -> RotarySpec:
    """Reads the rotary embeddings of a config.json; older checkpoints write ``rope_theta`` next to ``rope_scaling``,
    newer ones one dict. Raises ConfigError for a kind that is not supported, and for partial ones unless the family
    has them (``may_be_partial``)."""
    merged = dict(config.get("rope_scaling") or {}) or dict(config.get("rope_parameters") or {})
    theta = float(merged.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = merged.pop("rope_type", None) or merged.get("type") or "default"
    kind = _OLDER_NAMES.get(kind, kind)
    merged.pop("type", None)
    partial = float(merged.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    if partial != 1.0 and not may_be_partial:
        raise ConfigError("Partial rotary embeddings are not supported.")
    if kind not in ROPE_TYPES:
        raise ConfigError(f"Rope scaling {kind!r} is not supported: use a checkpoint with {', '.join(ROPE_TYPES)}.")
    scaling = None if kind == "default" else {"rope_type": kind, **_scaling(kind, merged, config)}
    return RotarySpec(theta, scaling, config["max_position_embeddings"], partial)


def read_ropes_of_kinds(config: Mapping[str, Any], local_theta: float) -> tuple[RotarySpec, RotarySpec]:
    """Reads the rotary embeddings of layers with full attention, and of layers with a sliding window, as Gemma 3's:
    newer files have ``rope_parameters`` of each kind of layers, older ones scale those of full attention alone.
    ``local_theta`` is the base of the others where the file does not say it."""
    given = config.get("rope_parameters") or {}
    full = {"rope_theta": config["rope_theta"], **(given.get("full_attention") or {}),
            **(config.get("rope_scaling") or {})}
    sliding = {"rope_theta": local_theta, **(given.get("sliding_attention") or {})}
    core = {"max_position_embeddings": config["max_position_embeddings"]}
    return read_rope({**core, "rope_parameters": full}), read_rope({**core, "rope_parameters": sliding})


def _scaling(kind: str, stated: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the parameters of a scaling."""
    if kind in ("llama3", "yarn", "longrope"):
        original = config.get("original_max_position_embeddings")
        if original is not None:
            stated["original_max_position_embeddings"] = original
        stated.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for name in ("long_factor", "short_factor") if kind == "longrope" else ():
        if not stated.get(name):
            raise KeyError(f"rope_scaling.{name} of longrope")
    if stated.get("factor") is None:
        if kind not in ("yarn", "longrope"):
            raise KeyError(f"rope_scaling.factor of {kind}")
        stated["factor"] = config["max_position_embeddings"] / stated["original_max_position_embeddings"]
    return stated
