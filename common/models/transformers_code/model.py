"""A model of transformers whose attention is Baton's, and whose linear layers are, split over ranks by its own plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...api.errors import ConfigError
from ...config.model import ModelSpec
from ...distributed.parallel import Parallel
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...forward.forward_batch import ForwardBatch
from ...forward.step_context import StepContext
from ...layers.classifier_head import ClassifierHead
from ...weights.slots import Slot, allocator
from ..decoder.module_calls import ModuleCall
from ..transformers_impl import TransformersSpec
from .attention import ATTENTION, StepAttention, TrialAttention, attending
from .construct import fix_rotary_length, make_model
from .replace import Replaced, replace_modules, run_trial

_HIDDEN: ContextVar[torch.Tensor | None] = ContextVar("hidden", default=None)
"""Hidden states of which only the head is computed at the moment."""


class TransformersModel:
    """One rank's part of the model of ``spec``, made by transformers; its weights are uninitialised
    until a loader has filled ``slots()``."""

    supports_microbatches = trims_last_layer = False
    may_fail_capture = True
    layers: tuple[Any, ...] = ()
    embed_tokens = None

    def __init__(self, spec: ModelSpec, own: TransformersSpec, parallel: Parallel, dtype: torch.dtype,
                 device: torch.device):
        """Raises ConfigError for a model that transformers does not have, or that needs more than causal attention."""
        self.pp, self.hidden_size, self.dtype, self.device = parallel.pp, spec.hidden_size, dtype, device
        self.token_exchange, self.logits_exchange = parallel.token_exchange, parallel.logits_exchange
        self._heads = spec.num_heads, spec.num_kv_heads, parallel.tp
        self._model = make_model(spec.architecture, own, ATTENTION, dtype, device)
        fix_rotary_length(self._model, spec.context_length)
        self._base = self._model.base_model
        self.classifier: ClassifierHead | None = None
        if spec.head == "classifier":
            self.classifier = self._take_classifier(spec)
        head = self._model.get_output_embeddings()
        ties = head is not None and head.weight is self._model.get_input_embeddings().weight
        trial = TrialAttention(spec)
        seen = run_trial(self._model if spec.head == "lm" else self._base, trial, device, dtype)
        trial.check()
        self._replaced: Replaced = replace_modules(self._model, spec, parallel.tp, dtype, device, seen, trial,
                                                   ties=ties)
        self.supports_cuda_graphs = self._replaced.captures
        self._output_kind: type[Any] = BaseModelOutputWithPast
        if self._base is not self._model:
            self._let_head_run_alone()

    def _take_classifier(self, spec: ModelSpec) -> ClassifierHead:
        score = self._model._modules.get("score")
        if type(score) is not nn.Linear or score.bias is not None:
            raise ConfigError(f"--model-impl transformers cannot serve {spec.architecture}: its head is not one linear "
                              "layer named score.")
        del self._model.score
        return ClassifierHead("score", spec.num_labels, score.in_features, allocator(self.dtype, self.device))

    def _let_head_run_alone(self) -> None:
        """Lets the model without a head answer with hidden states that are known: the rest of the model then computes
        their logits, with all that it does to them."""
        forward = self._base.forward

        def known_or_computed(*args: Any, **options: Any) -> Any:
            hidden = _HIDDEN.get()
            if hidden is not None:
                return self._output_kind(last_hidden_state=hidden)
            computed = forward(*args, **options)
            self._output_kind = type(computed)
            return computed

        self._base.forward = known_or_computed

    def forward(self, step: StepContext) -> torch.Tensor:
        """Returns logits ``[R, vocab]`` of the batch's ``logits_rows`` in the engine's type."""
        return self.compute_logits(self.hidden_states(step), step.logits)

    def hidden_states(self, step: StepContext) -> torch.Tensor:
        """Returns hidden states ``[R, hidden]`` of the batch's ``logits_rows`` after the final norm."""
        with attending(StepAttention(step, *self._heads)):
            hidden: torch.Tensor = self._base(**self._inputs(step.batch), use_cache=False).last_hidden_state[0]
        return hidden if step.batch.logits_rows is None else hidden[step.batch.logits_rows]

    def _inputs(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        if batch.embeds is None:
            return {"input_ids": batch.input_ids[None], "position_ids": batch.positions[None]}
        embeds = self._model.get_input_embeddings()(batch.input_ids)
        embeds[batch.embeds_rows] = batch.embeds.to(embeds.dtype)
        return {"inputs_embeds": embeds[None], "position_ids": batch.positions[None]}

    def compute_logits(self, hidden: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        """Returns logits ``[R, vocab]`` of hidden states ``[R, hidden]``, in their type."""
        current = _HIDDEN.set(hidden[None])
        try:
            logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            _HIDDEN.reset(current)
        return logits

    def module_calls(self) -> Iterator[ModuleCall]:
        """Yields the calls of all modules that steps call."""
        for name, module in self._model.named_modules():
            if name and not name.startswith(self._replaced.inside):
                yield ModuleCall((name,), module, "forward", one_sequence=True)

    def slots(self) -> Iterator[Slot]:
        yield from self._replaced.slots()
        if self.classifier is not None:
            yield from self.classifier.slots()
