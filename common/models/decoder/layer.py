"""A decoder layer, made of a family's blocks in the order of its ``LayerForm``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from ...config.model import ModelSpec
from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.parallel import Parallel
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...distributed.token_exchange import TokenExchange
from ...forward.piecewise import Projected
from ...forward.step_context import MicroBatch, StepContext
from ...layers.norm import NoNorm, unquantized
from ...weights.slots import Allocate, Slot
from .blocks import Blocks, LayerMLP, Norm
from .module_calls import ModuleCall


def mlp_over_dp(mlp: LayerMLP, exchange: TokenExchange) -> Callable[[Any, StepRows], MaybeDeferred]:
    """Returns ``mlp`` for an attention group's own rows, with the cheapest exchange that it allows."""
    if mlp.dispatches_tokens or mlp.computes_own_rows or not exchange.spans_dp:
        return mlp.forward_deferred
    if mlp.has_partial:
        return lambda x, rows: exchange.apply_partial(
            lambda y: mlp.partial(y, rows), lambda y: mlp.partial_pair(y, rows), x, rows)
    return lambda x, rows: exchange.apply(lambda y: mlp(y, rows), x, rows)


class BranchEnd:
    """What is done with the result of a branch before it joins the residual: a norm, and a multiplication."""

    def __init__(self, norm: Norm | None, multiplier: float):
        self.norm = norm
        self._multiplier = multiplier

    def __call__(self, x: MaybeDeferred) -> MaybeDeferred:
        if self.norm is None and self._multiplier == 1.0:
            return x
        rows = x if isinstance(x, torch.Tensor) else x.reduce()
        if self.norm is not None:
            rows = self.norm(rows)
        return rows if self._multiplier == 1.0 else rows * self._multiplier

    def slots(self) -> Iterator[Slot]:
        if self.norm is not None:
            yield from self.norm.slots()


class DecoderLayer:
    def __init__(self, index: int, kv_layer: int, spec: ModelSpec, parallel: Parallel, allocate: Allocate,
                 blocks: Blocks):
        """Builds layer ``index`` of the model, whose keys and values are layer ``kv_layer`` of the pool."""
        self.name = name = f"model.layers.{index}"
        self.form = form = blocks.form if blocks.form_of is None else blocks.form_of(index)

        def norm(part: str | None, exchange: TokenExchange | None = None) -> Norm | None:
            return None if part is None else blocks.norm(f"{name}.{part}", spec.hidden_size, allocate, exchange)

        self.input_norm: Norm = norm(form.input_norm) or NoNorm()
        self.attention = blocks.attention(f"{name}.self_attn", kv_layer, spec, parallel.attn_tp, allocate)
        self.mlp = blocks.mlp(f"{name}.mlp", index, spec, parallel.tp, allocate)
        exchange = parallel.token_exchange
        gathers = exchange.spans_dp and not self.mlp.computes_own_rows and not form.parallel
        self.mlp_norm: Norm = norm(form.mlp_norm, exchange if gathers else None) or NoNorm()
        self.mlp_over_dp = mlp_over_dp(self.mlp, exchange)
        self.mlp_input_format = unquantized if gathers or form.mlp_norm is None else self.mlp.activation_format
        # The MLP of a parallel layer may read the same rows, in another format.
        self.input_format = (unquantized if form.parallel or form.input_norm is None
                             else self.attention.activation_format)
        self.attention_end = BranchEnd(norm(form.attention_out_norm), form.residual_multiplier)
        self.mlp_end = BranchEnd(norm(form.mlp_out_norm), form.residual_multiplier)

    def __call__(self, x: MaybeDeferred, residual: torch.Tensor | None, step: StepContext,
                 cos_sin: torch.Tensor | None, trimmed: bool = False) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes the layer. Every sum over ranks is fused with the norm that follows, the last one with that of the
        next layer. As the last layer, with ``trimmed``, it stores all keys and values and then computes the rows of the
        batch's ``last_tokens`` only."""
        projected, residual = self.pre_attention(x, residual, step.rows)
        heads = self.attention.attend(projected, step, cos_sin, trimmed)
        del projected  # memory for the MLP's
        return self.post_last_attention(heads, residual, step, trimmed)

    def pre_attention(self, x: MaybeDeferred, residual: torch.Tensor | None,
                      rows: StepRows = ONE_GROUP) -> tuple[Projected, torch.Tensor]:
        """Computes the inputs of the attention, and the residual; in a parallel layer, in a step of ``rows``, the MLP
        is added to it."""
        normed, residual = self.input_norm.add_norm_as(self.input_format, x, residual)
        projected = self.attention.project(normed)
        if self.form.parallel:
            if self.form.mlp_norm is not None:
                normed = self.mlp_norm(residual)
            y = self.mlp_end(self.mlp_over_dp(normed, rows))
            residual = residual + (y if isinstance(y, torch.Tensor) else y.reduce())
        return projected, residual

    def post_attention(self, heads: torch.Tensor, residual: torch.Tensor,
                       rows: StepRows) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes what follows the attention in a step of ``rows``: its output projection and the MLP."""
        x = self.attention_end(self.attention.output.forward_deferred(heads))
        if self.form.parallel:
            return x, residual
        normed, residual = self.mlp_norm.add_norm_as(self.mlp_input_format, x, residual, rows)
        return self.mlp_end(self.mlp_over_dp(normed, rows)), residual

    def post_last_attention(self, heads: torch.Tensor, residual: torch.Tensor, step: StepContext,
                            trimmed: bool) -> tuple[MaybeDeferred, torch.Tensor]:
        """``post_attention``, where with ``trimmed`` ``heads`` are those of the batch's ``last_tokens`` only."""
        if trimmed:
            residual = residual[step.batch.logits_rows]
            if not len(residual):  # chunks in the middle of their prompts
                return residual, residual
        return self.post_attention(heads, residual, step.rows)

    def forward_microbatch(self, x: MaybeDeferred, residual: torch.Tensor | None, microbatch: MicroBatch,
                           cos_sin: torch.Tensor | None) -> Generator[None, None, tuple[MaybeDeferred, torch.Tensor]]:
        """Computes the layer for a micro-batch; yields while rows travel to the MLP, and while they come back. At the
        first yield its keys and values have been enqueued."""
        projected, residual = self.pre_attention(x, residual)
        heads = self.attention.attend(projected, microbatch.step, cos_sin, False)
        normed, residual = self.mlp_norm.add_norm_as(
            self.mlp_input_format, self.attention_end(self.attention.output.forward_deferred(heads)), residual)
        assert isinstance(normed, torch.Tensor)
        x = yield from microbatch.exchange.apply_partial_overlapped(self.mlp.partial, normed, microbatch.step.rows)
        return self.mlp_end(x), residual

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
        for module in (self.input_norm, self.attention, self.attention_end, self.mlp_norm, self.mlp, self.mlp_end):
            yield from module.slots()
