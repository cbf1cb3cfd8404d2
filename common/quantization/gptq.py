"""GPTQ checkpoints (arXiv:2210.17323) of AutoGPTQ and GPTQModel: weights in 4 or 8 bits, also with desc_act."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ..api.errors import ConfigError
from ..config.quantization import QUANTIZATIONS, LayerFormat, MixedFormats, QuantFormat, not_at_load
from .packed_int_format import PackedIntFormat, StoredInts, StoredTensor

STORED_V2 = StoredInts(StoredTensor("qweight", False, "inputs"), StoredTensor("scales", False),
                       StoredTensor("qzeros", False, "outputs"), "g_idx")
STORED = replace(STORED_V2, zero_offset=1)
"""The first version of the format stores each zero less one."""

_FORMATS = {"gptq": STORED, "gptq_v2": STORED_V2}


@QUANTIZATIONS.register("gptq", "gptq_marlin")
class Gptq:
    methods: ClassVar = ("gptq",)

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> MixedFormats:
        """``dynamic`` has regular expressions of layers' names: with ``-:`` before them, of layers that are not
        quantized, else of layers whose facts it overrides. The first that matches counts."""
        if stated.get("lm_head"):
            raise ConfigError("A quantized output head is not supported: use a checkpoint of GPTQ whose lm_head is "
                              "false.")
        form = stated.get("checkpoint_format") or "gptq"
        if form not in _FORMATS:
            raise ConfigError(f"GPTQ checkpoints with the checkpoint_format {form!r} are not supported: use one in "
                              "'gptq' or 'gptq_v2'.")
        rules: list[tuple[tuple[str, ...], LayerFormat | None]] = [*_dynamic(stated, _FORMATS[form])]
        modules = [name for names in stated.get("modules_in_block_to_quantize") or ()
                   for name in ((names,) if isinstance(names, str) else names)]
        rules.append((tuple(modules) or ("",), gptq_format(stated, _FORMATS[form])))
        return MixedFormats(((tuple(stated.get("modules_to_not_convert") or ()), None), *rules))

    @classmethod
    def at_load(cls, name: str) -> QuantFormat:
        raise not_at_load(name, "of GPTQ", instead="int4wo-128")


def _dynamic(stated: Mapping[str, Any],
             stored: StoredInts) -> Iterator[tuple[tuple[str, ...], LayerFormat | None]]:
    for pattern, facts in (stated.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            yield (f"re:{pattern[2:]}",), None
        else:
            yield (f"re:{pattern.removeprefix('+:')}",), gptq_format({**stated, **facts}, stored)


def gptq_format(stated: Mapping[str, Any], stored: StoredInts) -> PackedIntFormat:
    """Returns the format of layers by what a configuration states of them."""
    return PackedIntFormat(int(stated.get("bits") or 0), int(stated.get("group_size", 128)),
                           bool(stated.get("sym", True)), stored, bool(stated.get("desc_act")),
                           flags=("gptq", "gptq_marlin", "moe_wna16"))
