"""The causal language model: embedding, the layers that a family's blocks make (layer.py), norm and head."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch

from ...config.model import ModelSpec
from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.parallel import Parallel
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...forward.forward_batch import ForwardBatch
from ...forward.piecewise import PiecewiseStep, Projected
from ...forward.step_context import MicroBatch, StepContext
from ...layers.vocab import VocabTable
from ...weights.offload.layer_ring import LayerPass
from ...weights.offload.layer_stack import LayerStack
from ...weights.slots import Slot, allocator
from .blocks import Blocks, Classifier, EmbeddingStep, Norm
from .features import CapturedStates
from .layer import DecoderLayer
from .micro_batches import run_interleaved
from .module_calls import ModuleCall
from .rotary_tables import rotary_tables


class CausalLM:
    """One rank's part of the model; its weights are uninitialised until a loader has filled ``slots()``.

    A pipeline stage has its layers only, the first stage also the embedding, the last one also the final norm and the
    head.
    """

    supports_cuda_graphs = True
    may_fail_capture = False
    """True if a decode step's CUDA graphs may fail; it runs eagerly then."""

    def __init__(self, spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device,
                 blocks: Blocks):
        allocate = allocator(dtype, device, spec.quantization)
        self.pp = parallel.pp
        self.hidden_size, self.dtype, self.device = spec.hidden_size, dtype, device
        self.embed_tokens: VocabTable | None = None
        self.norm: Norm | None = None
        self.classifier: Classifier | None = None
        self.lm_head: VocabTable | None = None
        self.head = blocks.head
        self.embedding_steps: list[EmbeddingStep] = []
        if self.pp.is_first:
            self.embedding_steps = [make(spec, allocate) for make in blocks.embedding]
        tied = spec.head == "lm" and spec.tie_word_embeddings
        if self.pp.is_first or (self.pp.is_last and tied):
            self.embed_tokens = VocabTable("model.embed_tokens", spec.vocab_size, spec.hidden_size, parallel.attn_tp,
                                           allocate)
        own = self.pp.layers(spec.num_layers)
        self._stack = LayerStack(len(own), lambda number, allocate: DecoderLayer(
            own[number], number, spec, parallel, allocate, blocks), allocate, spec.offload)
        self.layers = self._stack.layers
        if self.pp.is_last:
            self.norm = blocks.norm("model.norm", spec.hidden_size, allocate, None)
            self.classifier = (blocks.classifier(spec.num_labels, spec.hidden_size, allocate) if spec.num_labels
                               else None)
            self.lm_head = self.embed_tokens if tied else None
            if spec.head == "lm" and not tied:
                self.lm_head = VocabTable("lm_head", spec.vocab_size, spec.hidden_size, parallel.lm_head_tp, allocate,
                                          bias=blocks.head.bias)
        self.token_exchange, self.logits_exchange = parallel.token_exchange, parallel.logits_exchange
        # Data-parallel attention groups compute the last MLP together, of as many rows as they agreed on; and where
        # experts' tokens are counted, all tokens are.
        self.trims_last_layer = self.pp.is_last and not (
            parallel.token_exchange.spans_dp or parallel.experts.counts_tokens)
        self.cos_sin = rotary_tables(blocks, spec, own, device)

    @property
    def supports_microbatches(self) -> bool:
        """True if a step can be computed in micro-batches: every MLP must have a partial result on each rank."""
        return self.pp.size == 1 and all(layer.mlp.has_partial and not layer.mlp.dispatches_tokens
                                         and not layer.mlp.computes_own_rows and not layer.form.parallel
                                         for layer in self.layers)

    @property
    def has_layer_inputs(self) -> bool:
        """True if ``hidden_states_and_features`` has the states that enter layers: in parallel layers, the residual has
        the MLP's result already."""
        return not any(layer.form.parallel for layer in self.layers)

    def forward(self, step: StepContext) -> torch.Tensor:
        """Returns logits ``[R, vocab]`` of the batch's ``logits_rows`` in the engine's type; a pipeline stage before
        the last returns none. See ``hidden_states``."""
        hidden = self.hidden_states(step)
        return self.compute_logits(hidden, step.logits) if self.pp.is_last else hidden

    def compute_logits(self, hidden: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        """Returns logits ``[R, vocab]`` of hidden states ``[R, hidden]``, in their type, with contiguous rows. ``rows``
        are those of every attention group."""
        form = self.head
        if form.multiplier != 1.0:  # not the logits, which are many
            hidden = hidden * form.multiplier
        logits = self._head_products(hidden, rows)
        return logits if not form.softcap else torch.tanh(logits / form.softcap) * form.softcap

    def _head_products(self, hidden: torch.Tensor, rows: StepRows) -> torch.Tensor:
        assert self.lm_head is not None
        if self.lm_head is self.embed_tokens:  # which every attention group has for itself
            return self.lm_head.logits(hidden)
        if self.logits_exchange.spans_dp and self.logits_exchange.dp_size == self.lm_head.tp.size:
            return self.logits_exchange.apply_columns(self.lm_head.local_logits, hidden,
                                                      rows)[:, :self.lm_head.vocab_size]
        return self.logits_exchange.apply(self.lm_head.logits, hidden, rows)

    def hidden_states(self, step: StepContext) -> torch.Tensor:
        """Returns hidden states ``[R, hidden]`` of the batch's ``logits_rows`` after the final norm.

        Layers store keys and values before ``step.after_layer`` is called. A stage before the last one sends its result
        to the next, and returns no rows.
        """
        trims = self._trims(step)
        x, residual = self._run_layers(step, trims)
        if not self.pp.is_last:
            x = x if isinstance(x, torch.Tensor) else x.reduce()
            self.pp.send(x, residual)
            return x[:0]
        assert self.norm is not None
        rows = step.batch.logits_rows
        if rows is not None and not trims:
            x = x[rows] if isinstance(x, torch.Tensor) else x.select(rows)
            residual = residual[rows]
        return self.norm.add_norm(x, residual)[0]

    def hidden_states_and_features(self, step: StepContext,
                                   layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what ``hidden_states`` returns, and features ``[T, F]`` of all rows: the hidden states that enter
        ``layers``, residual added, side by side (the number of layers is the final norm's input); without ``layers``
        those after the final norm. Not for pipeline stages."""
        assert self.norm is not None and self.pp.size == 1
        trims = bool(layers) and max(layers) < len(self.layers) and self._trims(step)
        captured = CapturedStates(layers)
        x, residual = self._run_layers(step, trims, captured)
        hidden, total = self.norm.add_norm(x, residual)
        captured.add(len(self.layers), total)
        rows = step.batch.logits_rows
        return hidden if rows is None or trims else hidden[rows], captured.joined() if layers else hidden

    def _trims(self, step: StepContext) -> bool:
        """Returns whether the last layer computes the batch's ``last_tokens`` only."""
        return (self.trims_last_layer and step.batch.last_tokens is not None
                and step.attention.attends_last_tokens)

    def _run_layers(self, step: StepContext, trims: bool,
                    captured: CapturedStates | None = None) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes all layers of this stage; returns rows and their residual, with ``trims`` those of ``last_tokens``.
        """
        x: MaybeDeferred
        x, residual = self._embed_or_receive(step.batch)
        with self._stack.start() as weights:
            if step.microbatches:
                return self._forward_microbatches(x, step, captured, weights)
            if step.piecewise is not None:
                return self._forward_piecewise(x, step, step.piecewise, trims, captured, weights)
            return self._forward_layers(x, residual, step, trims, captured, weights)

    def _forward_layers(self, x: MaybeDeferred, residual: torch.Tensor | None, step: StepContext, trims: bool,
                        captured: CapturedStates | None, weights: LayerPass) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes all layers. A layer's last product may be deferred to the first norm of the next one: only then its
        weights may go."""
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            trimmed = trims and index == last
            weights.enter(index)
            projected, residual = layer.pre_attention(x, residual, step.rows)
            weights.leave(index - 1)
            if captured is not None:
                captured.add(index, residual)
            heads = layer.attention.attend(projected, step, self.cos_sin[index], trimmed)
            del projected  # memory for the MLP's
            x, residual = layer.post_last_attention(heads, residual, step, trimmed)
            step.after_layer(index)
        assert residual is not None
        return x, residual

    def _forward_microbatches(self, x: torch.Tensor, step: StepContext, captured: CapturedStates | None,
                              weights: LayerPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all layers. When the last micro-batch reaches a layer, the others' keys and values are enqueued."""
        microbatches = step.microbatches

        def layers_of(microbatch: MicroBatch) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
            y: MaybeDeferred = x[microbatch.start:microbatch.stop]
            residual: torch.Tensor | None = None
            for index, layer in enumerate(self.layers):
                if captured is not None and index in captured.layers:
                    assert isinstance(y, torch.Tensor)
                    captured.add(index, y if residual is None else y + residual)
                weights.enter(index)
                y, residual = yield from layer.forward_microbatch(y, residual, microbatch, self.cos_sin[index])
                if microbatch is microbatches[-1]:
                    weights.leave(index)
                    step.after_layer(index)
            assert residual is not None
            return y if isinstance(y, torch.Tensor) else y.reduce(), residual

        results = run_interleaved([layers_of(microbatch) for microbatch in microbatches])
        return torch.cat([y for y, _ in results]), torch.cat([residual for _, residual in results])

    def between_attentions(self, index: int, heads: torch.Tensor, residual: torch.Tensor | None,
                           rows: StepRows) -> tuple[Projected, torch.Tensor]:
        """Computes what lies between the attentions of layers ``index`` - 1 and ``index`` of this stage, row by row.

        ``heads`` are attention outputs of the former, or the embeddings for the first layer, in a step of ``rows``.
        """
        x: MaybeDeferred = heads
        if index:
            assert residual is not None
            x, residual = self.layers[index - 1].post_attention(heads, residual, rows)
        return self.layers[index].pre_attention(x, residual, rows)

    def _forward_piecewise(self, x: torch.Tensor, step: StepContext, piecewise: PiecewiseStep, trimmed: bool,
                           captured: CapturedStates | None,
                           weights: LayerPass) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes all layers; the graphs end before the attention of the last one."""
        final = len(self.layers) - 1
        for index in range(final):
            weights.enter(index)
            projected, residual = piecewise.run(index, x)
            weights.leave(index - 1)
            if captured is not None:
                captured.add(index, residual)
            x = self.layers[index].attention.attend(projected, step, self.cos_sin[index], False)
            step.after_layer(index)
        weights.enter(final)
        projected, residual = piecewise.run(final, x)
        if captured is not None:
            captured.add(final, residual)
        heads = self.layers[final].attention.attend(projected, step, self.cos_sin[final], trimmed)
        result = self.layers[final].post_last_attention(heads, residual, step, trimmed)
        step.after_layer(final)
        return result

    def _embed_or_receive(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the input of this stage's first layer, and its residual."""
        if not self.pp.is_first:
            return self.pp.receive(batch.num_tokens, self.hidden_size, self.dtype, batch.input_ids.device)
        assert self.embed_tokens is not None
        x = self.embed_tokens.embed(batch.input_ids)
        for step in self.embedding_steps:
            if step.tokens_only:
                x = step(x, batch.positions)
        if batch.embeds is not None:
            x[batch.embeds_rows] = batch.embeds.to(x.dtype)
        for step in self.embedding_steps:
            if not step.tokens_only:
                x = step(x, batch.positions)
        return x, None

    def module_calls(self) -> Iterator[ModuleCall]:
        """Yields the calls of this stage's modules, in their order in a step."""
        if self.pp.is_first and self.embed_tokens is not None:
            yield ModuleCall(("model.embed_tokens",), self.embed_tokens, "embed")
        for layer in self.layers:
            yield from layer.module_calls()
        if self.norm is not None:
            yield ModuleCall(("model.norm",), self.norm, "add_norm")
        if self.lm_head is not None and self.pp.is_last:
            yield ModuleCall(("lm_head", "logits_processor"), self, "compute_logits")

    def slots(self) -> Iterator[Slot]:
        if self.embed_tokens is not None:
            yield from self.embed_tokens.slots()
        for step in self.embedding_steps:
            yield from step.slots()
        yield from self._stack.slots()
        if self.norm is not None:
            yield from self.norm.slots()
        for head in (self.lm_head, self.classifier):
            if head is not None and head is not self.embed_tokens:
                yield from head.slots()
