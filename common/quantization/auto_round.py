"""Checkpoints of AutoRound (arXiv:2309.05516) in the packings of GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..api.errors import ConfigError
from ..config.quantization import QUANTIZATIONS, LayerFormat, MixedFormats, QuantFormat, not_at_load
from .awq import awq_formats
from .gptq import STORED, gptq_format

_NOT_QUANTIZED_BITS = 16


@QUANTIZATIONS.register("auto-round")
class AutoRound:
    methods: ClassVar = ("auto-round", "intel/auto-round")

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> MixedFormats:
        """``extra_config`` has layers with other facts than the rest; in 16 bits or more, they are not quantized."""
        packing = stated.get("packing_format") or "auto_round:auto_gptq"
        if packing not in ("auto_round:auto_gptq", "auto_round:auto_awq"):
            raise ConfigError(f"AutoRound checkpoints with the packing_format {packing!r} are not supported: use one "
                              "in 'auto_round:auto_gptq' or 'auto_round:auto_awq'.")
        if (kind := stated.get("data_type") or "int") != "int":
            raise ConfigError(f"AutoRound checkpoints with the data_type {kind!r} are not supported: use one in 'int'.")
        as_awq, rules = packing.endswith("awq"), list[tuple[tuple[str, ...], LayerFormat | None]]()
        for name, facts in (stated.get("extra_config") or {}).items():
            plain = int(facts.get("bits", stated.get("bits", 4))) >= _NOT_QUANTIZED_BITS
            rules.append(((name,), None if plain else _layer({**stated, **facts}, as_awq)))
        return MixedFormats((*rules, (("",), _layer(stated, as_awq))))

    @classmethod
    def at_load(cls, name: str) -> QuantFormat:
        raise not_at_load(name, "of AutoRound", instead="int4wo-128")


def _layer(stated: Mapping[str, Any], as_awq: bool) -> LayerFormat | None:
    return awq_formats(stated, ()).for_layer("") if as_awq else gptq_format({**stated, "desc_act": False}, STORED)
