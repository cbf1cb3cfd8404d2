"""MiMo: Qwen2 with a draft layer of multi-token prediction."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from ..config.model import ModelSpec
from . import qwen
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts

_DRAFT = re.compile(r"^model\.mtp_layers\.(\d+)\.")
_NAMES = {"token_layernorm.": "enorm.", "hidden_layernorm.": "hnorm.", "final_layernorm.": "shared_head.norm."}


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Names draft layers as DeepSeek-V3's, whose projection takes the token first and the hidden state second."""
    from ..weights.fused_tensors import SwappedHalves

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        if draft := _DRAFT.match(name):
            name = f"model.layers.{spec.num_layers + int(draft[1])}.{name[draft.end():]}"
            for given, own in _NAMES.items():
                name = name.replace(given, own)
            if name.endswith(".input_proj.weight"):
                return [(name.replace(".input_proj.", ".eh_proj."), SwappedHalves(tensor))]
        return [(name, tensor)]

    return parts


MODELS.register("MiMoForCausalLM", "MiMoModel")(
    ModelFamily(partial(qwen.read_qwen2, slides=qwen.from_last_on, has_experts=False), qwen.blocks,
                qwen.DENSE, tensor_parts_of=tensor_parts_of, title="MiMo",
                notes="as Qwen2, with draft layers of multi-token prediction"))
