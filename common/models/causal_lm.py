"""A pre-norm decoder: Llama, Mistral, Qwen2 and Qwen3 by the switches of their ModelSpec; other attentions and MLPs are
passed in (layer.py says what they must be)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from ..attention.base import AttentionPlanner
from ..config.model import ModelSpec
from ..distributed.deferred_reduce import Summed
from ..distributed.parallel import Parallel
from ..forward.forward_batch import ForwardBatch
from ..layers.classifier_head import ClassifierHead
from ..layers.norm import RMSNorm
from ..layers.rotary import rotary_table
from ..layers.vocab import VocabTable
from ..weights.slots import Slot, allocator
from .layer import DecoderLayer, MakeAttention, MakeMLP, SelfAttention, dense_mlp
from .micro_batches import MicroBatch, in_turns
from .piecewise import PiecewiseStep, Projected


class CausalLM:
    """Holds one rank's weights, uninitialised until a loader has filled ``slots()``.

    A stage of a pipeline holds its layers alone, the first one the embedding beside them, the last one norm and head.
    """

    def __init__(self, spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device,
                 make_mlp: MakeMLP = dense_mlp, make_attention: MakeAttention = SelfAttention):
        allocate = allocator(dtype, device, spec.quantization)
        self.stages = parallel.stages
        self.width, self.dtype = spec.hidden_size, dtype
        self.embedding: VocabTable | None = None
        self.norm: RMSNorm | None = None
        self.labels: ClassifierHead | None = None
        self.head: VocabTable | None = None
        tied = spec.head == "lm" and spec.tie_word_embeddings
        if self.stages.first or (self.stages.last and tied):
            self.embedding = VocabTable("model.embed_tokens", spec.vocab_size, spec.hidden_size, parallel.attention,
                                        allocate)
        self.layers = [DecoderLayer(index, place, spec, parallel, allocate, make_mlp, make_attention)
                       for place, index in enumerate(self.stages.layers(spec.num_layers))]
        if self.stages.last:
            self.norm = RMSNorm("model.norm", spec.hidden_size, spec.rms_norm_eps, allocate)
            self.labels = ClassifierHead("score", spec.num_labels, spec.hidden_size,
                                         allocate) if spec.num_labels else None
            self.head = self.embedding if tied else None
            if spec.head == "lm" and not tied:
                self.head = VocabTable("lm_head", spec.vocab_size, spec.hidden_size, parallel.head, allocate)
        self.tokens, self.scored = parallel.tokens, parallel.scored
        # Of data-parallel attention's groups, the last MLP is computed together, of as many rows as were agreed on; and
        # where experts' tokens are counted, all are.
        self._scores_ends = self.stages.last and not (parallel.tokens.spans or parallel.experts.counted)
        self.cos_sin = rotary_table(spec, device)

    @property
    def halves(self) -> bool:
        """Whether a step can be computed in halves: every MLP must be a sum over ranks."""
        return self.stages.size == 1 and all(layer.mlp.sums and not layer.mlp.own_tokens for layer in self.layers)

    def forward(self, batch: ForwardBatch, attention: AttentionPlanner, after_layer: Callable[[int], None],
                halves: Sequence[MicroBatch] = (), pieces: PiecewiseStep | None = None) -> torch.Tensor:
        """Logits ``[R, vocab]`` of ``batch.logits_rows`` in the engine's type, see ``hidden``; none of a stage before
        the last."""
        hidden = self.hidden(batch, attention, after_layer, halves, pieces)
        return self.scores(hidden) if self.stages.last else hidden

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, vocab]`` of hidden states ``[R, hidden]``, in their type and contiguous in their rows."""
        assert self.head is not None
        if self.head is self.embedding:  # which every attention group has for itself
            return self.head.scores(hidden)
        if self.scored.spans and self.scored.ranks == self.head.tp.size:
            return self.scored.around_columns(self.head.columns, hidden)[:, :self.head.vocab_size]
        return self.scored.around(self.head.scores, hidden)

    def hidden(self, batch: ForwardBatch, attention: AttentionPlanner, after_layer: Callable[[int], None],
               halves: Sequence[MicroBatch] = (), pieces: PiecewiseStep | None = None) -> torch.Tensor:
        """Hidden states ``[R, hidden]`` of ``batch.logits_rows`` behind the last norm. ``attention`` has planned
        ``batch``, or each of ``halves`` its own rows. ``pieces``: what is recorded is not computed here.

        ``after_layer(i)`` is called once layer i of those here has been enqueued: its keys and values are in the pool
        by then. A stage before the last one hands what it has computed to the next, and returns no rows.
        """
        x: Summed
        if self.tokens.decode is not None:
            self.tokens.decode.mark(batch.live)
        x, residual = self._begin(batch)
        ends = self._scores_ends and batch.ends is not None and attention.attends_last_tokens
        if halves:
            x, residual = self._in_halves(x, halves, after_layer)
        elif pieces is not None:
            batch.heads = pieces.heads
            x, residual = self._in_pieces(x, pieces, attention, after_layer, batch if ends else None)
        else:
            for index, layer in enumerate(self.layers):
                last = batch if ends and index == len(self.layers) - 1 else None
                x, residual = layer(x, residual, attention, self.cos_sin, last)
                after_layer(index)
        assert residual is not None
        if not self.stages.last:
            x = x if isinstance(x, torch.Tensor) else x.total()
            self.stages.send(x, residual)
            return x[:0]
        assert self.norm is not None
        if batch.logits_rows is not None and not ends:
            x = x[batch.logits_rows] if isinstance(x, torch.Tensor) else x.rows(batch.logits_rows)
            residual = residual[batch.logits_rows]
        return self.norm.add(x, residual)[0]

    def _in_halves(self, x: torch.Tensor, halves: Sequence[MicroBatch],
                   after_layer: Callable[[int], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers. The last half comes to each of them when the others' keys and values are on their way."""
        def through(half: MicroBatch) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
            made: Summed = x[half.begin:half.end]
            residual: torch.Tensor | None = None
            for index, layer in enumerate(self.layers):
                made, residual = yield from layer.stages(made, residual, half, self.cos_sin)
                if half is halves[-1]:
                    after_layer(index)
            assert residual is not None
            return made if isinstance(made, torch.Tensor) else made.total(), residual

        parts = in_turns([through(half) for half in halves])
        return torch.cat([made for made, _ in parts]), torch.cat([residual for _, residual in parts])

    def between(self, index: int, rows: torch.Tensor,
                residual: torch.Tensor | None) -> tuple[Projected, torch.Tensor]:
        """What stands between the attentions of layers ``index`` - 1 and ``index`` of those here, row by row: ``rows``
        are heads' results of the one, or in front of the first layer what enters it."""
        made: Summed = rows
        if index:
            assert residual is not None
            made, residual = self.layers[index - 1].leave(rows, residual)
        return self.layers[index].enter(made, residual)

    def _in_pieces(self, x: torch.Tensor, pieces: PiecewiseStep, attention: AttentionPlanner,
                   after_layer: Callable[[int], None], last: ForwardBatch | None) -> tuple[Summed, torch.Tensor]:
        """All layers; of the last one only what stands before its attention is recorded."""
        final = len(self.layers) - 1
        for index in range(final):
            projected, _ = pieces.before(index, x)
            x = self.layers[index].attention.attend(projected, attention, self.cos_sin, None)
            after_layer(index)
        projected, residual = pieces.before(final, x)
        heads = self.layers[final].attention.attend(projected, attention, self.cos_sin, last)
        made = self.layers[final].finish(heads, residual, last)
        after_layer(final)
        return made

    def _begin(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What enters the first layer here, and its residual."""
        if not self.stages.first:
            return self.stages.receive(batch.num_tokens, self.width, self.dtype, batch.input_ids.device)
        assert self.embedding is not None
        x = self.embedding.embed(batch.input_ids)
        if batch.embeds is not None:
            x[batch.embeds_rows] = batch.embeds.to(x.dtype)
        return x, None

    def slots(self) -> Iterator[Slot]:
        if self.embedding is not None:
            yield from self.embedding.slots()
        for layer in self.layers:
            yield from layer.slots()
        if self.norm is not None:
            yield from self.norm.slots()
        for head in (self.head, self.labels):
            if head is not None and head is not self.embedding:
                yield from head.slots()
