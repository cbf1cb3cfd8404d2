"""Granite 3's mixtures of experts, with or without a shared expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from . import granite
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values = config.values
    moe = MoESpec.in_every_layer(values, shared_size=values["shared_intermediate_size"], shared_name="shared_mlp")
    return dataclasses.replace(granite.read(config), moe=moe)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.moe import mixed_mlp

    return dataclasses.replace(granite.blocks(spec, parallel), mlp=mixed_mlp(parallel.experts))


_NAMES = {
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".mlp.gate.weight",
    ".block_sparse_moe.router.weight": ".mlp.gate.weight",
    ".block_sparse_moe.experts.": ".mlp.experts.",
    ".shared_mlp.": ".mlp.shared_mlp.", ".output_linear.": ".down_proj."}


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Gives experts and routers the names that other families' have, and splits stacks, and gates from ups."""
    from ..weights.expert_names import by_expert
    from ..weights.fused_tensors import split_names

    assert spec.moe is not None
    split = split_names({"input_linear": dict.fromkeys(("gate_proj", "up_proj"), spec.moe.shared_size)}, _NAMES)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        for own_name, part in split(name, tensor):
            yield from by_expert(own_name, part)

    return parts


DEFAULTS = {
    **COMMON, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
    "eos_token_id": 2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    "attention_multiplier": 1.0, "num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0}

MODELS.register("GraniteMoeForCausalLM", "GraniteMoeModel", "GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel")(
    ModelFamily(read, blocks, DEFAULTS, tensor_parts_of=tensor_parts_of, title="Granite 3 MoE",
                notes="mixtures of experts, with or without a shared one"))
