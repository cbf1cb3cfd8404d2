"""A pre-norm decoder's layer: self-attention and an MLP, either of which a model may have otherwise."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from ...kernels.arguments import Float8Format, HeadNorms
from ..attention.base import AttentionBackend, AttentionPlanner
from ..config.model import ModelSpec
from ..distributed.deferred_reduce import Summed
from ..distributed.parallel import Parallel
from ..distributed.token_exchange import TokenExchange
from ..distributed.tp import TPGroup
from ..forward.forward_batch import ForwardBatch
from ..layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ..layers.mlp import MLP
from ..layers.norm import RMSNorm, as_they_are
from ..weights.slots import Allocate, Slot
from .micro_batches import MicroBatch
from .piecewise import Projected


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
        self.parts = [size // spec.head_dim for size in self.qkv.sizes]
        self.heads = sum(self.parts)
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

    def form(self, rows: int) -> Float8Format | None:
        """See LinearMethod."""
        return self.qkv.form(rows)

    def project(self, x: Rows) -> Projected:
        return (self.qkv(x),)

    def attend(self, projected: Projected, attention: AttentionBackend, cos_sin: torch.Tensor,
               last: ForwardBatch | None) -> torch.Tensor:
        (qkv,) = projected
        q, k, v = qkv.view(len(qkv), self.heads, self.head_dim).split_with_sizes(self.parts, 1)  # [T, heads, head_dim]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        sinks = None if self.sinks is None else self.sinks.target
        parts = (self.layer, q, k, v, cos_sin, norms, sinks)
        return (attention.run(*parts) if last is None else attention.run_last_tokens(last, *parts)).flatten(1)

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

    def form(self, rows: int) -> Float8Format | None:
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

    def form(self, rows: int) -> Float8Format | None:
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

    def __call__(self, x: Summed, residual: torch.Tensor | None, attention: AttentionPlanner, cos_sin: torch.Tensor,
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

    def stages(self, x: Summed, residual: torch.Tensor | None, half: MicroBatch,
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
