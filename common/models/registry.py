"""Which module computes which architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config.model import ARCHITECTURES, ModelSpec
from ..distributed.parallel import Parallel
from .causal_lm import CausalLM
from .deepseek import deepseek_decoder
from .moe import moe_decoder

ModelFactory = Callable[[ModelSpec, Parallel, torch.dtype, torch.device], CausalLM]

MODELS: dict[str, ModelFactory] = {
    name: deepseek_decoder if found.latent else moe_decoder if found.experts else CausalLM
    for name, found in ARCHITECTURES.items()}


def build_model(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The module of ``spec.architecture``, its weights still uninitialised."""
    return MODELS[spec.architecture](spec, parallel, dtype, device)
