"""Finds modules of transformers that compute what blocks of Baton's compute, by trying them.

A norm, an MLP or an attention is replaced only after it has given, with random values in the place of its projections,
what the block gives. Nothing is recognised by the name of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ....kernels.rowwise.rmsnorm import rmsnorm
from ...config.model import ModelSpec
from ...layers.activations import ACTIVATIONS, activation_of
from .attention import AttentionInputs, attending

_TRIAL_ROWS = 3
_TRIAL_POSITIONS = (5, 11, 29)


class _Constant(nn.Module):
    """Answers with a constant, and keeps its last input."""

    def __init__(self, result: torch.Tensor | None = None):
        super().__init__()
        self._result = result
        self.input: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input = x
        return x if self._result is None else self._result


def _copy_without(module: nn.Module, stubs: Mapping[str, nn.Module]) -> Any:
    """Returns a copy of ``module`` on the CPU in float32 whose children ``stubs`` are these."""
    kept = {name: module._modules[name] for name in stubs}
    try:
        for name, stub in stubs.items():
            module._modules[name] = stub
        copied = copy.deepcopy(module)
    finally:
        module._modules.update(kept)
    for name, stub in stubs.items():
        copied._modules[name] = stub
    return copied.to("cpu", torch.float32)


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and bool(torch.allclose(first, second, rtol=1e-4, atol=1e-5))


def norm_eps(module: Any) -> float | None:
    """Returns the epsilon of a module that is ``rmsnorm`` of its rows, in every bit of bfloat16; None of others."""
    own = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(own) != ["weight"] or own["weight"].dim() != 1 or not isinstance(eps, float) or list(module.children()):
        return None
    trial = copy.deepcopy(module).to("cpu", torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    trial.weight.data.copy_(torch.rand(trial.weight.shape, generator=generator) + 0.5)
    x = torch.randn(_TRIAL_ROWS, len(trial.weight), generator=generator).bfloat16()
    try:
        found = trial(x)
    except (TypeError, RuntimeError):
        return None
    return eps if torch.equal(found, rmsnorm(x, trial.weight.data, eps)[0]) else None


def replace_norm(module: Any, eps: float) -> None:
    """Replaces the computation of a norm by the kernel."""
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return rmsnorm(rows, module.weight.data, eps)[0].view(hidden_states.shape)

    module.forward = forward


MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


def mlp_activation(module: nn.Module) -> str | None:
    """Returns the activation of a module that is a gated MLP of ``gate_proj``, ``up_proj`` and ``down_proj``; None of
    others."""
    if not all(type(module._modules.get(part)) is nn.Linear for part in MLP_PARTS):
        return None
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 1, _TRIAL_ROWS, 8, generator=generator)
    trial = _copy_without(module, dict(zip(MLP_PARTS, (_Constant(gate), _Constant(up), _Constant()))))
    try:
        found = trial(torch.zeros(1, _TRIAL_ROWS, 8))
    except (TypeError, RuntimeError, ValueError):
        return None
    if not isinstance(found, torch.Tensor):
        return None
    both = torch.cat((gate, up), -1)
    return next((name for name in ACTIVATIONS if _same(found, activation_of(name, gated=True)(both))), None)


ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns the cosines and sines ``[1, P, R]`` in float32 of positions ``[1, P]``."""


class AttentionForm(NamedTuple):
    """What Baton's self-attention needs to compute a module: ``head_norm_eps`` where heads are normed; queries are
    multiplied by ``factor`` beside the usual scale."""

    head_norm_eps: float | None
    factor: float


def attention_form(module: Any, spec: ModelSpec, rotary: Rotary) -> AttentionForm | None:
    """Returns the form of a module that is self-attention with rotary embeddings by ``rotary``; None of others."""
    if not all(type(module._modules.get(part)) is nn.Linear for part in ATTENTION_PARTS):
        return None
    biases = [module._modules[part].bias is not None for part in ATTENTION_PARTS[:3]]
    children = set(module._modules) - set(ATTENTION_PARTS)
    if len(set(biases)) > 1 or children - {"q_norm", "k_norm"}:
        return None
    norms = [norm_eps(module._modules[name]) for name in sorted(children)]
    if children and (len(norms) != 2 or None in norms or norms[0] != norms[1]
                     or len(module.q_norm.weight) != spec.head_dim):
        return None
    cos, sin = rotary(torch.tensor([_TRIAL_POSITIONS]))
    factor = _factor_alike(module, spec, cos, sin, norms)
    return None if factor is None or (norms and factor != 1.0) else AttentionForm(norms[0] if norms else None, factor)


def _factor_alike(module: Any, spec: ModelSpec, cos: torch.Tensor, sin: torch.Tensor,
                  norms: list[float | None]) -> float | None:
    """Runs the module with random projections, and compares what it passes to attention, and to its output. Returns
    the factor of its queries; None where it computes something else."""
    generator = torch.Generator().manual_seed(0)
    sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    projected = [torch.randn(1, len(_TRIAL_POSITIONS), size, generator=generator) for size in sizes]
    result = torch.randn(len(_TRIAL_POSITIONS), spec.num_heads, spec.head_dim, generator=generator)
    output = _Constant()
    stubs: dict[str, nn.Module] = dict(zip(ATTENTION_PARTS, [*map(_Constant, projected), output]))
    trial, inputs = _copy_without(module, stubs), AttentionInputs(result)
    for name in ("q_norm", "k_norm") if norms else ():
        getattr(trial, name).weight.data.fill_(0.75)
    try:
        with attending(inputs):
            found = trial(hidden_states=torch.zeros(1, len(_TRIAL_POSITIONS), 8), position_embeddings=(cos, sin),
                          attention_mask=None)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return None
    if not isinstance(found, tuple) or len(found) != 2 or len(inputs.seen) != 1 or output.input is None:
        return None
    q, k, v = (x[0].unflatten(-1, (-1, spec.head_dim)) for x in projected)
    if norms:
        weight = torch.full((spec.head_dim,), 0.75)
        q, k = (rmsnorm(x, weight, norms[0] or 0.0)[0] for x in (q, k))
    want = _rotated(q, cos, sin), _rotated(k, cos, sin), v
    if not (all(map(_same, inputs.seen[0], want)) and _same(output.input[0], result.flatten(1))):
        return None
    scaling = inputs.scalings[0]
    return 1.0 if scaling in (None, spec.head_dim ** -0.5) else float(scaling or 0.0) * spec.head_dim ** 0.5


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first values of heads ``x`` [T, heads, D], the first half of them with the second."""
    width = cos.shape[-1] // 2
    cosines, sines = cos[0, :, None, :width], sin[0, :, None, :width]
    first, second, rest = x[..., :width], x[..., width:2 * width], x[..., 2 * width:]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), -1)
