"""A causal model of transformers whose attention is Baton's.

Transformers calls a registered function for each layer's attention. The step travels to it in a context variable, since
not all models hand keyword arguments down. The rows of a step, of several requests, are one sequence to the model: only
attention may let rows see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

from ...api.errors import ConfigError
from ...config.model import ModelSpec
from ...distributed.parallel import Parallel
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...forward.forward_batch import ForwardBatch
from ...forward.step_context import StepContext
from ...weights.slots import Slot
from .module_calls import ModuleCall

_ATTENTION = "baton_paged"
_STEP: ContextVar[StepContext | _Trial] = ContextVar("step")
"""The step that ``TransformersModel`` computes at the moment."""
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias", "head_mask", "alibi", "relative_position_bias")
"""Keyword arguments by which models ask for other attention than the softmax of scaled scores."""


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: torch.Tensor | None, *, scaling: float | None = None,
            **options: Any) -> tuple[torch.Tensor, None]:
    """Attends for transformers: ``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D], with their rotary
    embeddings; returns ``[1, T, Hq, D]``. Raises ConfigError for what Baton's attention cannot compute."""
    asked = [name for name in _CHANGES_SCORES if options.get(name) is not None]
    if asked or attention_mask is not None or not options.get("is_causal", getattr(module, "is_causal", True)):
        what = asked[0] if asked else "a mask of its own"
        raise ConfigError(f"--model-impl transformers cannot serve {type(module).__name__}: its attention has {what}.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if scaling is not None and scaling != q.shape[-1] ** -0.5:
        q = q * (scaling * q.shape[-1] ** 0.5)
    step = _STEP.get()
    run: Callable[..., torch.Tensor] = step.attention.run
    if isinstance(step, _Trial):
        step.windows[module.layer_idx] = options.get("sliding_window")
    out = run(module.layer_idx, q, k, v)
    step.after_layer(module.layer_idx)
    return out[None], None


transformers.AttentionInterface.register(_ATTENTION, _attend)


class _Trial:
    """Takes the place of a step and of its attention, to see what a model asks for: ``windows`` by layer."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.windows: dict[int, int | None] = {}
        self.attention = self

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if q.shape[1:] != (spec.num_heads, spec.head_dim) or not (
                k.shape[1:] == v.shape[1:] == (spec.num_kv_heads, spec.head_dim)):
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}, whose heads are not those "
                              "that its config.json states, or differ between keys and values.")
        return torch.zeros_like(q)

    def after_layer(self, layer: int) -> None:
        """Does nothing."""


class TransformersModel:
    """The model of ``spec``, made by transformers of a ``config``; its weights are uninitialised until a loader has
    filled ``slots()``. It is on one rank, and computes its rows without CUDA graphs."""

    supports_microbatches = supports_cuda_graphs = trims_last_layer = False
    layers: tuple[Any, ...] = ()
    classifier = embed_tokens = None

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any], parallel: Parallel, dtype: torch.dtype,
                 device: torch.device):
        """Raises ConfigError for a model that transformers does not have, or that needs more than causal attention."""
        self.pp, self.hidden_size, self.dtype, self.device = parallel.pp, spec.hidden_size, dtype, device
        kind = getattr(transformers, spec.architecture, None)
        if kind is None or not getattr(kind, "_supports_attention_backend", False) or getattr(kind, "_is_stateful",
                                                                                             False):
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}: transformers "
                              f"{transformers.__version__} has no such model whose attention can be replaced.")
        options = {key: value for key, value in config.items() if key != "model_type"}
        with torch.device(device), no_init_weights():
            self._model = kind._from_config(transformers.AutoConfig.for_model(config["model_type"], **options),
                                            dtype=dtype, attn_implementation=_ATTENTION)
        self._model.tie_weights()
        self._model.eval().requires_grad_(False)
        self._check(spec)

    def _check(self, spec: ModelSpec) -> None:
        """Computes two rows, to refuse now what attention could not compute later."""
        trial = _Trial(spec)
        with torch.inference_mode():
            self._run(self._model, trial, input_ids=torch.zeros((1, 2), dtype=torch.int64, device=self.device),
                      position_ids=torch.arange(2, device=self.device)[None])
        windows = tuple(trial.windows.get(layer) for layer in range(spec.num_layers))
        stated = spec.windows or (None,) * spec.num_layers
        if trial.windows.keys() != set(range(spec.num_layers)) or windows != stated:
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}: not every layer has causal "
                              "attention over all tokens, or over the sliding_window that its config.json states.")

    def forward(self, step: StepContext) -> torch.Tensor:
        """Returns logits ``[R, vocab]`` of the batch's ``logits_rows`` in the engine's type."""
        rows = step.batch.logits_rows
        kept: torch.Tensor | int = 0 if rows is None else rows
        logits: torch.Tensor = self._run(self._model, step, **self._inputs(step.batch), logits_to_keep=kept).logits[0]
        return logits

    def _run(self, module: Callable[..., Any], step: StepContext | _Trial, **inputs: Any) -> Any:
        """Calls the model, or its part without a head, whose attention finds ``step``."""
        current = _STEP.set(step)
        try:
            return module(**inputs, use_cache=False)
        finally:
            _STEP.reset(current)

    def _inputs(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        if batch.embeds is None:
            return {"input_ids": batch.input_ids[None], "position_ids": batch.positions[None]}
        embeds = self._model.get_input_embeddings()(batch.input_ids)
        embeds[batch.embeds_rows] = batch.embeds.to(embeds.dtype)
        return {"inputs_embeds": embeds[None], "position_ids": batch.positions[None]}

    def hidden_states(self, step: StepContext) -> torch.Tensor:
        """Returns hidden states ``[R, hidden]`` of the batch's ``logits_rows`` after the final norm."""
        hidden: torch.Tensor = self._run(self._model.base_model, step, **self._inputs(step.batch)).last_hidden_state[0]
        return hidden if step.batch.logits_rows is None else hidden[step.batch.logits_rows]

    def compute_logits(self, hidden: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        raise AssertionError("models scale logits outside of their heads: forward computes them")

    def module_calls(self) -> Iterator[ModuleCall]:
        """Yields the calls of all modules."""
        for name, module in self._model.named_modules():
            if name:
                yield ModuleCall((name,), module, "forward", one_sequence=True)

    def slots(self) -> Iterator[Slot]:
        seen = set()
        for name, tensor in self._model.state_dict().items():
            if tensor.data_ptr() not in seen:  # a tied head is the embedding
                seen.add(tensor.data_ptr())
                yield Slot(name, tensor, tuple(tensor.shape))
