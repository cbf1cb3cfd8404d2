"""Activations of MLPs in plain torch, by the names of transformers; kernels fuse those of gates by silu and GELU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import gelu, relu, silu

from ...kernels.elementwise import by_element
from ...kernels.rowwise.gelu_and_mul import gelu_and_mul
from ..api.errors import ConfigError

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu, "gelu_fast": _gelu_tanh, "gelu_new": _gelu_tanh, "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu, "relu": relu, "relu2": _relu2, "silu": silu, "swish": silu}


_GELUS = {name: function is _gelu_tanh for name, function in ACTIVATIONS.items() if function in (gelu, _gelu_tanh)}
"""Whether they are the approximation by tanh."""


def activation_of(name: str, *, gated: bool) -> Activation:
    """Returns the activation ``name``; with ``gated`` it takes gates followed by ups ``[T, 2 * size]`` and returns
    activated gates times ups ``[T, size]``. Raises ConfigError for a name that is unknown."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"Activation {name!r} is not supported: use a checkpoint with hidden_act "
                          f"{', '.join(map(repr, ACTIVATIONS))}.")
    if gated and name in _GELUS:
        return partial(gelu_and_mul, tanh=_GELUS[name])
    activate = partial(by_element, ACTIVATIONS[name])
    if not gated:
        return activate

    def activate_and_mul(x: torch.Tensor) -> torch.Tensor:
        gates, ups = x.chunk(2, dim=-1)
        return activate(gates) * ups

    return activate_and_mul
