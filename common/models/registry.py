"""Which module computes which architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config.model import ARCHITECTURES, ModelSpec
from ..distributed.tp import TPGroup
from .decoder import DenseDecoder

ModelFactory = Callable[[ModelSpec, TPGroup, torch.dtype, torch.device], DenseDecoder]

MODELS: dict[str, ModelFactory] = dict.fromkeys(ARCHITECTURES, DenseDecoder)


def build_model(spec: ModelSpec, tp: TPGroup, dtype: torch.dtype, device: torch.device) -> DenseDecoder:
    """The module of ``spec.architecture``, its weights still uninitialised."""
    return MODELS[spec.architecture](spec, tp, dtype, device)
