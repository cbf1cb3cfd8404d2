"""A pre-norm decoder layer, made of a family's blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from ...config.model import ModelSpec
from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.parallel import Parallel
from ...distributed.step_rows import StepRows
from ...distributed.token_exchange import TokenExchange
from ...forward.piecewise import Projected
from ...forward.step_context import MicroBatch, StepContext
from ...layers.norm import unquantized
from ...weights.slots import Allocate, Slot
from .blocks import Blocks, LayerMLP
from .module_calls import ModuleCall


def mlp_over_dp(mlp: LayerMLP, exchange: TokenExchange) -> Callable[[Any, StepRows], MaybeDeferred]:
    """Returns ``mlp`` for an attention group's own rows, with the cheapest exchange that it allows."""
    if mlp.dispatches_tokens or mlp.computes_own_rows or not exchange.spans_dp:
        return mlp.forward_deferred
    if mlp.has_partial:
        return lambda x, rows: exchange.apply_partial(
            lambda y: mlp.partial(y, rows), lambda y: mlp.partial_pair(y, rows), x, rows)
    return lambda x, rows: exchange.apply(lambda y: mlp(y, rows), x, rows)


class DecoderLayer:
    def __init__(self, index: int, kv_layer: int, spec: ModelSpec, parallel: Parallel, allocate: Allocate,
                 blocks: Blocks):
        """Builds layer ``index`` of the model, whose keys and values are layer ``kv_layer`` of the pool."""
        self.name = name = f"model.layers.{index}"
        self.input_norm = blocks.norm(f"{name}.input_layernorm", spec.hidden_size, allocate, None)
        self.attention = blocks.attention(f"{name}.self_attn", kv_layer, spec, parallel.attn_tp, allocate)
        self.mlp = blocks.mlp(f"{name}.mlp", index, spec, parallel.tp, allocate)
        exchange = parallel.token_exchange
        gathers = exchange.spans_dp and not self.mlp.computes_own_rows
        self.mlp_norm = blocks.norm(f"{name}.post_attention_layernorm", spec.hidden_size, allocate,
                                    exchange if gathers else None)
        self.mlp_over_dp = mlp_over_dp(self.mlp, exchange)
        self.mlp_input_format = unquantized if gathers else self.mlp.activation_format

    def __call__(self, x: MaybeDeferred, residual: torch.Tensor | None, step: StepContext, cos_sin: torch.Tensor,
                 trimmed: bool = False) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes the layer. Every sum over ranks is fused with the norm that follows, the last one with that of the
        next layer. As the last layer, with ``trimmed``, it stores all keys and values and then computes the rows of the
        batch's ``last_tokens`` only."""
        projected, residual = self.pre_attention(x, residual)
        heads = self.attention.attend(projected, step, cos_sin, trimmed)
        del projected  # memory for the MLP's
        return self.post_last_attention(heads, residual, step, trimmed)

    def pre_attention(self, x: MaybeDeferred, residual: torch.Tensor | None) -> tuple[Projected, torch.Tensor]:
        """Computes the inputs of the attention, and the residual."""
        normed, residual = self.input_norm.add_norm_as(self.attention.activation_format, x, residual)
        return self.attention.project(normed), residual

    def post_attention(self, heads: torch.Tensor, residual: torch.Tensor,
                       rows: StepRows) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes what follows the attention in a step of ``rows``: its output projection and the MLP."""
        normed, residual = self.mlp_norm.add_norm_as(
            self.mlp_input_format, self.attention.output.forward_deferred(heads), residual, rows)
        return self.mlp_over_dp(normed, rows), residual

    def post_last_attention(self, heads: torch.Tensor, residual: torch.Tensor, step: StepContext,
                            trimmed: bool) -> tuple[MaybeDeferred, torch.Tensor]:
        """``post_attention``, where with ``trimmed`` ``heads`` are those of the batch's ``last_tokens`` only."""
        if trimmed:
            residual = residual[step.batch.logits_rows]
            if not len(residual):  # chunks in the middle of their prompts
                return residual, residual
        return self.post_attention(heads, residual, step.rows)

    def forward_microbatch(self, x: MaybeDeferred, residual: torch.Tensor | None, microbatch: MicroBatch,
                           cos_sin: torch.Tensor) -> Generator[None, None, tuple[MaybeDeferred, torch.Tensor]]:
        """Computes the layer for a micro-batch; yields while rows travel to the MLP, and while they come back. At the
        first yield its keys and values have been enqueued."""
        projected, residual = self.pre_attention(x, residual)
        heads = self.attention.attend(projected, microbatch.step, cos_sin, False)
        normed, residual = self.mlp_norm.add_norm_as(
            self.mlp_input_format, self.attention.output.forward_deferred(heads), residual)
        assert isinstance(normed, torch.Tensor)
        x = yield from microbatch.exchange.apply_partial_overlapped(self.mlp.partial, normed, microbatch.step.rows)
        return x, residual

    def module_calls(self) -> Iterator[ModuleCall]:
        """Yields the calls of a step that is not in micro-batches, in their order."""
        attention = f"{self.name}.self_attn"
        yield ModuleCall((f"{self.name}.input_layernorm",), self.input_norm, "add_norm_as")
        yield ModuleCall((f"{attention}.qkv_proj",), self.attention, "project")
        yield ModuleCall((f"{attention}.attn",), self.attention, "attend")
        yield ModuleCall((attention, f"{attention}.o_proj"), self.attention.output, "forward_deferred")
        yield ModuleCall((f"{self.name}.post_attention_layernorm",), self.mlp_norm, "add_norm_as")
        yield ModuleCall((f"{self.name}.mlp",), self, "mlp_over_dp")

    def slots(self) -> Iterator[Slot]:
        for module in (self.input_norm, self.attention, self.mlp_norm, self.mlp):
            yield from module.slots()
