"""MoE models: Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss."""

from __future__ import annotations

import torch

from ...config.model import ModelSpec
from ...distributed.expert_parallel import ExpertParallel
from ...distributed.parallel import Parallel
from ...distributed.tp import TPGroup
from ...layers.moe import MoE
from ...weights.slots import Allocate
from .causal_lm import CausalLM
from .layer import LayerMLP, MakeMLP, dense_mlp


def moe_decoder(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    return CausalLM(spec, parallel, dtype, device, mixed_mlp(parallel.experts))


def mixed_mlp(share: ExpertParallel) -> MakeMLP:
    """Returns a factory that builds an MoE layer for the layers that ``spec.moe`` names, a dense MLP for the others."""
    def make(name: str, index: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate) -> LayerMLP:
        if spec.moe is None or index not in spec.moe.layers:
            return dense_mlp(name, index, spec, tp, allocate)
        return MoE(name, spec.moe, spec.hidden_size, share, allocate)

    return make
