"""AWQ checkpoints (arXiv:2306.00978) as AutoAWQ writes them for GEMMs: weights in 4 bits, with zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..api.errors import ConfigError
from ..config.quantization import QUANTIZATIONS, MixedFormats, QuantFormat, not_at_load
from .packed_int_format import PackedIntFormat, StoredInts, StoredTensor

STORED = StoredInts(StoredTensor("qweight", False, "outputs"), StoredTensor("scales", False),
                    StoredTensor("qzeros", False, "outputs"), "g_idx", positions=(0, 4, 1, 5, 2, 6, 3, 7))


@QUANTIZATIONS.register("awq", "awq_marlin", "moe_wna16")
class Awq:
    methods: ClassVar = ("awq",)

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> MixedFormats:
        if (version := str(stated.get("version") or "gemm").lower()) != "gemm":
            raise ConfigError(f"AWQ checkpoints of version {version!r} are not supported: use one of version 'gemm'.")
        if (backend := stated.get("backend") or "autoawq") != "autoawq":
            raise ConfigError(f"AWQ checkpoints of the backend {backend!r} are not supported: use one of 'autoawq'.")
        return awq_formats(stated, tuple(stated.get("modules_to_not_convert") or ()))

    @classmethod
    def at_load(cls, name: str) -> QuantFormat:
        raise not_at_load(name, "of AWQ", instead="int4wo-128")


def awq_formats(stated: Mapping[str, Any], ignored: tuple[str, ...]) -> MixedFormats:
    """Returns the formats of a checkpoint in which all linear layers but the ``ignored`` ones are quantized."""
    bits, group = stated.get("bits", stated.get("w_bit")), stated.get("group_size", stated.get("q_group_size", 128))
    if bits != 4:
        raise ConfigError(f"AWQ weights in {bits} bits are not supported: use a checkpoint in 4 bits.")
    layer = PackedIntFormat(4, int(group), False, STORED, flags=("awq", "awq_marlin", "moe_wna16"))
    return MixedFormats(((ignored, None), (("",), layer)))
