"""The attention function that transformers calls for each layer of a model, and the trial that shows what it asks for.

The step travels to it in a context variable, since not all models hand keyword arguments down. The rows of a step, of
several requests, are one sequence to the model: only attention may let rows see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers

from ...api.errors import ConfigError
from ...config.model import ModelSpec
from ...distributed.tp import TPGroup
from ...forward.step_context import StepContext

ATTENTION = "baton_paged"
"""The name under which transformers knows the function."""
_CHANGES_SCORES = ("position_bias", "head_mask", "alibi", "relative_position_bias")
"""Keyword arguments by which models ask for other attention than the softmax of scaled scores."""


class _Attends(Protocol):
    """What computes, or observes, the attention of the model that runs at the moment."""

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None,
               options: Mapping[str, Any]) -> torch.Tensor:
        """Returns ``[T, Hq, D]`` of ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D]."""


_CURRENT: ContextVar[_Attends] = ContextVar("attention")


@contextmanager
def attending(current: _Attends) -> Iterator[None]:
    """Lets ``current`` attend for the models that run within."""
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_step() -> StepContext:
    """Returns the step that is computed at the moment."""
    current = _CURRENT.get()
    assert isinstance(current, StepAttention)
    return current.step


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: torch.Tensor | None, *, scaling: float | None = None,
            **options: Any) -> tuple[torch.Tensor, None]:
    """Attends for transformers: ``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D], with their rotary
    embeddings; returns ``[1, T, Hq, D]``. Raises ConfigError for what Baton's attention cannot compute."""
    asked = [name for name in _CHANGES_SCORES if options.get(name) is not None]
    if asked or attention_mask is not None or not options.get("is_causal", getattr(module, "is_causal", True)):
        what = asked[0] if asked else "a mask of its own"
        raise ConfigError(f"--model-impl transformers cannot serve {type(module).__name__}: its attention has {what}.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _CURRENT.get().attend(module, q, k, v, scaling, options)[None], None


transformers.AttentionInterface.register(ATTENTION, _attend)


@dataclass(frozen=True)
class StepAttention:
    """The attention of a step, by its plan. A rank's pool holds its share of ``num_heads`` and ``num_kv_heads``; a
    layer that is not split over the ranks attends with that share, and all ranks gather the results."""

    step: StepContext
    num_heads: int
    num_kv_heads: int
    tp: TPGroup

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None,
               options: Mapping[str, Any]) -> torch.Tensor:
        rows, heads, head_dim = q.shape
        if scaling is not None and scaling != head_dim ** -0.5:
            q = q * (scaling * head_dim ** 0.5)
        whole, sinks = self.tp.size > 1 and heads == self.num_heads, options.get("s_aux")
        if sinks is not None and self.tp.size > 1 and len(sinks) == self.num_heads:
            sinks = self._own(sinks[None], self.num_heads)[0]
        if whole:
            q, k, v = self._own(q, self.num_heads), self._own(k, self.num_kv_heads), self._own(v, self.num_kv_heads)
        out: torch.Tensor = self.step.attention.run(
            module.layer_idx, q.contiguous(), k.contiguous(), v.contiguous(), None, None,
            None if sinks is None else sinks.float())
        self.step.after_layer(module.layer_idx)
        if whole:
            out = self.tp.all_gather_last_dim(out.flatten(1)).view(rows, heads, head_dim)
        return out

    def _own(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Returns this rank's of all ``heads``: with more ranks than heads, neighbouring ranks have the same one."""
        first = self.tp.rank * heads // self.tp.size
        return x[:, first:first + max(1, heads // self.tp.size)]


class TrialAttention:
    """Takes the place of a step's attention, to see what a model asks for: windows and scales by layer."""

    def __init__(self, spec: ModelSpec):
        self._spec = spec
        self.windows: dict[int, int | None] = {}
        self.modules: dict[int, Any] = {}

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None,
               options: Mapping[str, Any]) -> torch.Tensor:
        spec = self._spec
        if q.shape[1:] != (spec.num_heads, spec.head_dim) or not (
                k.shape[1:] == v.shape[1:] == (spec.num_kv_heads, spec.head_dim)):
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}, whose heads are not those "
                              "that its config.json states, or differ between keys and values.")
        if (options.get("softcap") or 0.0) != spec.scores.softcap:
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}: its scores are capped at "
                              f"{options.get('softcap')}, and its config.json states {spec.scores.softcap or 'no cap'} "
                              "as attn_logit_softcapping.")
        if module.layer_idx in self.modules:
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}, whose layers attend more "
                              "than once.")
        self.windows[module.layer_idx] = options.get("sliding_window")
        self.modules[module.layer_idx] = module
        return torch.zeros_like(q)

    def check(self) -> None:
        """Raises ConfigError where a layer did not attend as the specification says."""
        spec = self._spec
        windows = tuple(self.windows.get(layer) for layer in range(spec.num_layers))
        stated = spec.windows or (None,) * spec.num_layers
        if self.windows.keys() != set(range(spec.num_layers)) or windows != stated:
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}: not every layer has causal "
                              "attention over all tokens, or over the sliding_window that its config.json states.")


class AttentionInputs:
    """Takes the place of a step's attention, to see what one module passes to it; answers with ``result``."""

    def __init__(self, result: torch.Tensor):
        self._result = result
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.scalings: list[float | None] = []

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None,
               options: Mapping[str, Any]) -> torch.Tensor:
        self.seen.append((q, k, v))
        self.scalings.append(scaling)
        return self._result
