"""Float8 checkpoints of FBGEMM (Llama 3.1 405B's): weights with a scale for each output, activations for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..config.quantization import QUANTIZATIONS, not_at_load
from .fp8 import Fp8


@QUANTIZATIONS.register("fbgemm_fp8")
class FbgemmFp8:
    """Its bound of activations (``activation_scale_ub``) is not applied: it would saturate larger values, which here
    have the scale that they need."""

    methods: ClassVar = ("fbgemm_fp8",)

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Fp8:
        return Fp8("channel", stored=True, ignored=tuple(stated.get("modules_to_not_convert") or ()))

    @classmethod
    def at_load(cls, name: str) -> Fp8:
        raise not_at_load(name, "of FBGEMM", instead="fp8")
