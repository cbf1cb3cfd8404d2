"""EAGLE-3's draft network (arXiv:2503.01840): one decoder layer, whose attention reads an embedding and a hidden state.

Its first pass reads a projection of hidden states that enter three of the model's layers, the others its own before
its norm. The layer's tensors are ``midlayer.*`` in the authors' checkpoints and SpecForge's, ``layers.0.*`` in others
(SafeAILab/EAGLE, eagle/model/cnets.py; sgl-project/SpecForge, specforge/modeling/draft/llama3_eagle.py; options beyond
the paper's are those of vllm-project/speculators).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ....kernels.gemm.dense_matmul import dense_matmul
from ...config.model import ModelSpec
from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.parallel import Parallel
from ...forward.step_context import StepContext
from ...layers.vocab import VocabTable
from ...weights.lazy import LazyTensor
from ...weights.slots import Allocate, Slot
from ..decoder.blocks import Blocks
from .network import DraftStates, joined_input, last_rows

_LAYER = "midlayer"


@dataclass(frozen=True)
class Eagle3Facts:
    """Facts of a checkpoint. ``num_states`` hidden states of ``state_size`` values are projected, with a norm over all
    (``input_norm``) or one for each (``state_norms``) before. ``norm_before_residual``: the layer's residual is the
    normed hidden state."""

    num_states: int
    state_size: int
    bias: bool = False
    input_norm: bool = False
    state_norms: bool = False
    norm_before_residual: bool = False


class Eagle3Layer:
    def __init__(self, spec: ModelSpec, parallel: Parallel, allocate: Allocate, blocks: Blocks, *,
                 norm_before_residual: bool):
        size = spec.hidden_size
        self._norm_before_residual = norm_before_residual
        self.token_norm = blocks.norm(f"{_LAYER}.input_layernorm", size, allocate, None)
        self.hidden_norm = blocks.norm(f"{_LAYER}.hidden_norm", size, allocate, None)
        self.attention = blocks.attention(f"{_LAYER}.self_attn", 0, spec, parallel.attn_tp, allocate,
                                          in_features=2 * size)
        self.mlp_norm = blocks.norm(f"{_LAYER}.post_attention_layernorm", size, allocate, None)
        self.mlp = blocks.mlp(f"{_LAYER}.mlp", 0, spec, parallel.tp, allocate)

    def __call__(self, embed: VocabTable, ids: torch.Tensor, hidden: torch.Tensor, step: StepContext,
                 cos_sin: torch.Tensor, trimmed: bool) -> tuple[MaybeDeferred, torch.Tensor]:
        """Returns rows and their residual ``[T, hidden]``, which may be in the memory of ``hidden``; with ``trimmed``
        those of the batch's ``last_tokens`` only."""
        joined = joined_input(embed, ids, hidden, self.token_norm, self.hidden_norm)
        projected = self.attention.project(joined)
        heads = self.attention.attend(projected, step, cos_sin, trimmed)
        residual = joined[:, hidden.shape[1]:].contiguous() if self._norm_before_residual else hidden
        if trimmed:
            residual = last_rows(residual, step)
            if not len(residual):  # keys and values are stored alone
                return residual, residual
        normed, residual = self.mlp_norm.add_norm(self.attention.output.forward_deferred(heads), residual)
        return self.mlp.forward_deferred(normed), residual

    def slots(self) -> Iterator[Slot]:
        for module in (self.token_norm, self.hidden_norm, self.attention, self.mlp_norm, self.mlp):
            yield from module.slots()


class Eagle3Network:
    """The layer, its projection and its norm, with uninitialised weights. ``own_embed``: the checkpoint has an
    embedding, else ``embed`` is the model's."""

    depth = 1

    def __init__(self, spec: ModelSpec, facts: Eagle3Facts, parallel: Parallel, allocate: Allocate, blocks: Blocks,
                 embed: VocabTable, cos_sin: torch.Tensor, *, own_embed: bool):
        self._own_embed, self._embed, self._cos_sin = own_embed, embed, cos_sin
        width = facts.num_states * facts.state_size
        self.input_norm = blocks.norm("input_norm", width, allocate, None) if facts.input_norm else None
        self.state_norms = [blocks.norm(f"fc_norm.{index}", facts.state_size, allocate, None)
                            for index in range(facts.num_states if facts.state_norms else 0)]
        self.fc = allocate(spec.hidden_size, width)
        self.bias = allocate(spec.hidden_size) if facts.bias else None
        self.layer = Eagle3Layer(spec, parallel, allocate, blocks, norm_before_residual=facts.norm_before_residual)
        self.norm = blocks.norm("norm", spec.hidden_size, allocate, None)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.state_norms:
            parts = features.chunk(len(self.state_norms), dim=-1)
            features = torch.cat([norm(part.contiguous()) for norm, part in zip(self.state_norms, parts)], dim=-1)
        hidden = dense_matmul(features, self.fc)
        return hidden if self.bias is None else hidden + self.bias

    def __call__(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor, step: StepContext,
                 trimmed: bool = False) -> DraftStates:
        x, residual = self.layer(self._embed, ids, hidden, step, self._cos_sin, trimmed)
        return DraftStates(*self.norm.add_norm(x, residual))

    def slots(self) -> Iterator[Slot]:
        if self._own_embed:
            yield from self._embed.slots()
        for module in (self.input_norm, *self.state_norms, self.layer, self.norm):
            if module is not None:
                yield from module.slots()
        yield Slot("fc.weight", self.fc, tuple(self.fc.shape))
        if self.bias is not None:
            yield Slot("fc.bias", self.bias, tuple(self.bias.shape))


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """Gives tensors of all layouts the names of the authors'."""
    yield re.sub(r"^layers\.0\.", f"{_LAYER}.", name.removeprefix("model.")), tensor
