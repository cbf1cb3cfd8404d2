"""A pre-norm decoder: Llama, Mistral, Qwen2 and Qwen3 by the switches of their ModelSpec; other attentions and MLPs are
passed in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ...kernels.forms import Float8Form, HeadNorms
from ..attention.base import AttentionBackend, Planned
from ..config.model import ModelSpec
from ..distributed.exchange import TokenExchange
from ..distributed.parallel import Parallel
from ..distributed.pending import Summed
from ..distributed.tp import TPGroup
from ..engine.forward_batch import ForwardBatch
from ..layers.labels import LabelHead
from ..layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ..layers.mlp import MLP
from ..layers.norm import RMSNorm, as_they_are
from ..layers.rotary import rotary_table
from ..layers.vocab import VocabTable
from ..weights.slots import Allocate, Slot, allocator
from .halves import Half, in_turns
from .pieces import Pieces, Projected


class SelfAttention:
    def __init__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate):
        self.layer = layer
        self.head_dim = spec.head_dim
        q_size = spec.num_heads * spec.head_dim
        self.qkv = ColumnLinear(spec.hidden_size, [
            Columns.shard(f"{name}.q_proj", q_size, tp),
            Columns.kv_shard(f"{name}.k_proj", spec.num_kv_heads, spec.head_dim, tp),
            Columns.kv_shard(f"{name}.v_proj", spec.num_kv_heads, spec.head_dim, tp),
        ], spec.attention_bias, allocate)
        self.output = RowLinear(f"{name}.o_proj", q_size, spec.hidden_size, spec.o_bias, tp, allocate)
        self.width = q_size // tp.size
        self.sinks: Slot | None = None
        if spec.sinks:
            heads = spec.num_heads // tp.size
            self.sinks = Slot(f"{name}.sinks", allocate(heads, dtype=torch.float32), (spec.num_heads,), 0,
                              tp.rank * heads)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(f"{name}.q_norm", spec.head_dim, spec.rms_norm_eps, allocate)
            self.k_norm = RMSNorm(f"{name}.k_norm", spec.head_dim, spec.rms_norm_eps, allocate)

    def form(self, rows: int) -> Float8Form | None:
        """See LinearMethod."""
        return self.qkv.form(rows)

    def project(self, x: Rows) -> Projected:
        return (self.qkv(x),)

    def attend(self, projected: Projected, attention: AttentionBackend, cos_sin: torch.Tensor,
               last: ForwardBatch | None) -> torch.Tensor:
        (qkv,) = projected
        parts = qkv.split(self.qkv.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # [T, heads, head_dim]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        sinks = None if self.sinks is None else self.sinks.target
        parts = (self.layer, q, k, v, cos_sin, norms, sinks)
        return (attention.run(*parts) if last is None else attention.run_ends(last, *parts)).flatten(1)

    def slots(self) -> Iterator[Slot]:
        for module in (self.qkv, self.output, self.q_norm, self.k_norm):
            if module is not None:
                yield from module.slots()
        if self.sinks is not None:
            yield self.sinks


class LayerAttention(Protocol):
    """What stands before a layer's MLP, by the backend that it is made for; ``output`` brings its heads together, of
    which this rank's make ``width`` values a row."""

    width: int

    @property
    def output(self) -> RowLinear: ...

    def form(self, rows: int) -> Float8Form | None:
        """Of its input, see LinearMethod."""

    def project(self, x: Any) -> Projected:
        """What ``attend`` is given of the layer's input ``[T, hidden]``, row by row."""

    def attend(self, projected: Projected, attention: Any, cos_sin: torch.Tensor,
               last: ForwardBatch | None) -> torch.Tensor:
        """Heads' results side by side, ``[T, width]``; in the last layer of the batch ``last`` those of its ``ends``
        alone. May overwrite ``projected``."""

    def slots(self) -> Iterator[Slot]: ...


MakeAttention = Callable[[str, int, ModelSpec, TPGroup, Allocate], LayerAttention]
"""Builds the attention that a layer of the pool belongs to, as ``MakeMLP`` a layer's MLP."""


class LayerMLP(Protocol):
    """What stands behind a layer's attention: ``[T, hidden] -> [T, hidden]``, of the tokens of all attention groups
    together, or with ``own_tokens`` of this rank's alone."""

    own_tokens: bool

    @property
    def sums(self) -> bool:
        """Whether the ranks' ``partial`` results add up to it."""

    def form(self, rows: int) -> Float8Form | None:
        """Of its input, see LinearMethod."""

    def __call__(self, x: Any) -> torch.Tensor: ...

    def pending(self, x: Any) -> Summed: ...

    def partial(self, x: Any) -> torch.Tensor: ...

    def summands(self, x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``partial`` as a sum of two, which whoever sums over the ranks makes on the way."""

    def slots(self) -> Iterator[Slot]: ...


MakeMLP = Callable[[str, int, ModelSpec, TPGroup, Allocate], LayerMLP]
"""Builds layer ``index``'s MLP, whose tensors' names begin with the first argument."""


def dense_mlp(name: str, index: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate) -> LayerMLP:
    return MLP(name, spec.hidden_size, spec.intermediate_size, spec.mlp_bias, tp, allocate)


def over_groups(mlp: LayerMLP, tokens: TokenExchange) -> Callable[[Any], Summed]:
    """``mlp`` of an attention group's own rows, in the cheapest way that it allows."""
    if mlp.own_tokens or not tokens.spans:
        return mlp.pending
    return partial(tokens.summed, mlp.partial, mlp.summands) if mlp.sums else partial(tokens.around, mlp)


class DecoderLayer:
    def __init__(self, index: int, place: int, spec: ModelSpec, parallel: Parallel, allocate: Allocate,
                 make_mlp: MakeMLP, make_attention: MakeAttention):
        """Layer ``index`` of the model, whose keys and values are layer ``place`` of the pool."""
        name = f"model.layers.{index}"
        self.input_norm = RMSNorm(f"{name}.input_layernorm", spec.hidden_size, spec.rms_norm_eps, allocate)
        self.attention = make_attention(f"{name}.self_attn", place, spec, parallel.attention, allocate)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", spec.hidden_size, spec.rms_norm_eps, allocate,
                                parallel.tokens)
        self.mlp = make_mlp(f"{name}.mlp", index, spec, parallel.mlp, allocate)
        self.mlp_of_groups = over_groups(self.mlp, parallel.tokens)
        self.mlp_form = as_they_are if parallel.tokens.spans else self.mlp.form

    def __call__(self, x: Summed, residual: torch.Tensor | None, attention: Planned, cos_sin: torch.Tensor,
                 last: ForwardBatch | None = None) -> tuple[Summed, torch.Tensor]:
        """Every sum over ranks is made by the norm behind it, the last one by the next layer's. As the last layer of
        the batch ``last`` it goes on with the rows of its ``ends`` once it has the keys and values of all."""
        projected, residual = self.enter(x, residual)
        heads = self.attention.attend(projected, attention, cos_sin, last)
        del projected  # room for the MLP's
        return self.finish(heads, residual, last)

    def enter(self, x: Summed, residual: torch.Tensor | None) -> tuple[Projected, torch.Tensor]:
        """What stands before its attention, and the residual that goes past it."""
        normed, residual = self.input_norm.add_for(self.attention.form, x, residual)
        return self.attention.project(normed), residual

    def leave(self, heads: torch.Tensor, residual: torch.Tensor) -> tuple[Summed, torch.Tensor]:
        """What stands behind its attention."""
        normed, residual = self.mlp_norm.add_for(self.mlp_form, self.attention.output.pending(heads), residual)
        return self.mlp_of_groups(normed), residual

    def finish(self, heads: torch.Tensor, residual: torch.Tensor,
               last: ForwardBatch | None) -> tuple[Summed, torch.Tensor]:
        """``leave``; of ``last`` with the rows that ``heads`` are of."""
        if last is not None:
            residual = residual[last.logits_rows]
            if not len(residual):  # chunks in the middle of their prompts
                return residual, residual
        return self.leave(heads, residual)

    def stages(self, x: Summed, residual: torch.Tensor | None, half: Half,
               cos_sin: torch.Tensor) -> Generator[None, None, tuple[Summed, torch.Tensor]]:
        """The same of a half of the step, with a yield while rows travel to the MLP, and one while they come back. At
        the first its keys and values have been enqueued."""
        projected, residual = self.enter(x, residual)
        heads = self.attention.attend(projected, half.attention, cos_sin, None)
        normed, residual = self.mlp_norm.add_for(self.mlp_form, self.attention.output.pending(heads), residual)
        assert isinstance(normed, torch.Tensor)
        x = yield from half.tokens.summed_in_stages(self.mlp.partial, normed)
        return x, residual

    def slots(self) -> Iterator[Slot]:
        for module in (self.input_norm, self.attention, self.mlp_norm, self.mlp):
            yield from module.slots()


class DenseDecoder:
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
        self.labels: LabelHead | None = None
        self.head: VocabTable | None = None
        tied = spec.head == "words" and spec.tie_word_embeddings
        if self.stages.first or (self.stages.last and tied):
            self.embedding = VocabTable("model.embed_tokens", spec.vocab_size, spec.hidden_size, parallel.attention,
                                        allocate)
        self.layers = [DecoderLayer(index, place, spec, parallel, allocate, make_mlp, make_attention)
                       for place, index in enumerate(self.stages.layers(spec.num_layers))]
        if self.stages.last:
            self.norm = RMSNorm("model.norm", spec.hidden_size, spec.rms_norm_eps, allocate)
            self.labels = LabelHead("score", spec.num_labels, spec.hidden_size, allocate) if spec.num_labels else None
            self.head = self.embedding if tied else None
            if spec.head == "words" and not tied:
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

    def forward(self, batch: ForwardBatch, attention: Planned, after_layer: Callable[[int], None],
                halves: Sequence[Half] = (), pieces: Pieces | None = None) -> torch.Tensor:
        """Logits ``[R, vocab]`` of ``batch.logits_rows`` in the engine's type, see ``hidden``; none of a stage before
        the last."""
        hidden = self.hidden(batch, attention, after_layer, halves, pieces)
        return self.scores(hidden) if self.stages.last else hidden

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, vocab]`` of hidden states ``[R, hidden]``, in their type and contiguous in their rows."""
        assert self.head is not None
        if self.head is self.embedding:  # which every attention group has for itself
            return self.head.scores(hidden)
        return self.scored.around(self.head.scores, hidden)

    def hidden(self, batch: ForwardBatch, attention: Planned, after_layer: Callable[[int], None],
               halves: Sequence[Half] = (), pieces: Pieces | None = None) -> torch.Tensor:
        """Hidden states ``[R, hidden]`` of ``batch.logits_rows`` behind the last norm. ``attention`` has planned
        ``batch``, or each of ``halves`` its own rows. ``pieces``: what is recorded is not computed here.

        ``after_layer(i)`` is called once layer i of those here has been enqueued: its keys and values are in the pool
        by then. A stage before the last one hands what it has computed to the next, and returns no rows.
        """
        x: Summed
        if self.tokens.decode is not None:
            self.tokens.decode.mark(batch.live)
        x, residual = self._begin(batch)
        ends = self._scores_ends and batch.ends is not None and attention.attends_ends
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

    def _in_halves(self, x: torch.Tensor, halves: Sequence[Half],
                   after_layer: Callable[[int], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers. The last half comes to each of them when the others' keys and values are on their way."""
        def through(half: Half) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
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

    def _in_pieces(self, x: torch.Tensor, pieces: Pieces, attention: Planned, after_layer: Callable[[int], None],
                   last: ForwardBatch | None) -> tuple[Summed, torch.Tensor]:
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
