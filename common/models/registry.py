"""The registry of architectures: the factory of each supported one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config.model import ARCHITECTURES, ModelSpec
from ..distributed.parallel import Parallel
from .decoder.causal_lm import CausalLM
from .decoder.latent_attention import deepseek_decoder
from .decoder.moe import moe_decoder

ModelFactory = Callable[[ModelSpec, Parallel, torch.dtype, torch.device], CausalLM]

MODELS: dict[str, ModelFactory] = {
    name: deepseek_decoder if architecture.latent else moe_decoder if architecture.experts else CausalLM
    for name, architecture in ARCHITECTURES.items()}


def build_model(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Builds the module of ``spec.architecture`` with uninitialised weights."""
    return MODELS[spec.architecture](spec, parallel, dtype, device)
