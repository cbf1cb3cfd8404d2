"""Checkpoints of compressed-tensors (github.com/vllm-project/compressed-tensors): groups of layers, each with a scheme
of its own. The files of the formats read the schemes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..api.errors import ConfigError
from ..config.quantization import (
    COMPRESSED_GROUPS,
    QUANTIZATIONS,
    CompressedGroup,
    LayerFormat,
    MixedFormats,
    QuantFormat,
    not_at_load,
)


@QUANTIZATIONS.register("compressed-tensors")
class CompressedTensors:
    methods: ClassVar = ("compressed-tensors",)

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> MixedFormats:
        """Targets are layers' names, regular expressions after ``re:``, or ``Linear``, which is every layer that no
        other group names. ``ignore`` goes before all."""
        groups = [*(stated.get("config_groups") or {}).values()]
        if not groups:
            raise ConfigError("A checkpoint of compressed-tensors must have config_groups, which say how its layers "
                              "are quantized: this one has none.")
        named: list[tuple[tuple[str, ...], LayerFormat | None]] = [(tuple(stated.get("ignore") or ()), None)]
        others: list[tuple[tuple[str, ...], LayerFormat | None]] = []
        for group in groups:
            layer = _read(group, str(group.get("format") or stated.get("format") or ""))
            targets = tuple(group.get("targets") or ())
            if unknown := [target for target in targets if "Embedding" in target]:
                raise ConfigError(f"Quantized embeddings are not supported ({unknown[0]!r} of targets): use a "
                                  "checkpoint whose targets are linear layers.")
            if names := tuple(target for target in targets if target != "Linear"):
                named.append((names, layer))
            if "Linear" in targets:
                others.append((("",), layer))
        return MixedFormats((*named, *others))

    @classmethod
    def at_load(cls, name: str) -> QuantFormat:
        raise not_at_load(name, "of compressed-tensors", instead="fp8")


def _read(group: Mapping[str, Any], storage: str) -> LayerFormat:
    stated = CompressedGroup(group.get("weights") or {}, group.get("input_activations") or None, storage)
    refusal = None
    for reader in COMPRESSED_GROUPS.entries().values():
        try:
            found = reader(stated)
        except ConfigError as error:
            refusal = refusal or error
            continue
        if found is not None:
            return found
    raise refusal or ConfigError(
        f"This scheme of compressed-tensors is not supported: its {stated.description}. Use a checkpoint with weights "
        "and activations in float8, or with weights in 4 or 8 bits and activations that are not quantized.")
