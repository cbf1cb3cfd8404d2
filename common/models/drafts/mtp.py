"""Layers of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2) as a draft network.

Each is one layer of the model's family, over a projection of a hidden state and an embedding. It takes the model's
hidden states after its final norm, which is what checkpoints were trained with, or its own after its norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ....kernels.gemm.dense_matmul import dense_matmul
from ...config.model import ModelSpec
from ...distributed.parallel import Parallel
from ...forward.step_context import StepContext
from ...layers.vocab import VocabTable
from ...weights.slots import Allocate, Slot
from ..decoder.blocks import Blocks
from ..decoder.layer import DecoderLayer
from .network import DraftStates, joined_input


class MTPDraftLayer:
    """One layer: computes hidden states of the next position from those of a position and the token after it."""

    def __init__(self, index: int, kv_layer: int, spec: ModelSpec, parallel: Parallel, allocate: Allocate,
                 blocks: Blocks):
        """Builds layer ``index`` of the checkpoint, whose keys and values are layer ``kv_layer`` of the draft's pool.
        """
        name = f"model.layers.{index}"
        self._name = name
        self.token_norm = blocks.norm(f"{name}.enorm", spec.hidden_size, allocate, None)
        self.hidden_norm = blocks.norm(f"{name}.hnorm", spec.hidden_size, allocate, None)
        self.eh_proj = allocate(spec.hidden_size, 2 * spec.hidden_size)  # not quantized in float8 checkpoints either
        self.layer = DecoderLayer(index, kv_layer, spec, parallel, allocate, blocks)
        self.norm = blocks.norm(f"{name}.shared_head.norm", spec.hidden_size, allocate, None)

    def __call__(self, hidden: torch.Tensor, embed: VocabTable, ids: torch.Tensor, step: StepContext,
                 cos_sin: torch.Tensor, trimmed: bool = False) -> torch.Tensor:
        """Takes ``hidden`` [T, hidden] of positions and ``ids`` [T], the tokens after them, which ``embed`` has;
        returns ``[T, hidden]``, with ``trimmed`` the rows of the batch's ``last_tokens`` only. ``step`` is one of
        a batch at these positions."""
        joined = joined_input(embed, ids, hidden, self.token_norm, self.hidden_norm)
        x, residual = self.layer(dense_matmul(joined, self.eh_proj), None, step, cos_sin, trimmed)
        return self.norm.add_norm(x, residual)[0]

    def slots(self) -> Iterator[Slot]:
        for module in (self.token_norm, self.hidden_norm, self.layer, self.norm):
            yield from module.slots()
        yield Slot(f"{self._name}.eh_proj.weight", self.eh_proj, tuple(self.eh_proj.shape))


class MTPNetwork:
    """``depth`` layers, the first of which is layer ``first`` of the checkpoint, with uninitialised weights."""

    def __init__(self, spec: ModelSpec, first: int, depth: int, parallel: Parallel, allocate: Allocate, blocks: Blocks,
                 embed: VocabTable, cos_sin: torch.Tensor):
        """``embed`` is the model's. All layers have experts where the model has any."""
        self.depth = depth
        self._embed, self._cos_sin = embed, cos_sin
        spec = mtp_spec(spec, first, depth)
        self.layers = [MTPDraftLayer(first + kv_layer, kv_layer, spec, parallel, allocate, blocks)
                       for kv_layer in range(depth)]

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def __call__(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor, step: StepContext,
                 trimmed: bool = False) -> DraftStates:
        states = self.layers[layer](hidden, self._embed, ids, step, self._cos_sin, trimmed)
        return DraftStates(states, states)

    def slots(self) -> Iterator[Slot]:
        for layer in self.layers:
            yield from layer.slots()


def mtp_spec(spec: ModelSpec, first: int, depth: int) -> ModelSpec:
    """Returns the specification of ``depth`` layers of multi-token prediction, whose numbers begin at ``first``; those
    of hybrid models have attention."""
    moe = spec.moe
    if moe is not None:
        moe = dataclasses.replace(moe, layers=tuple(range(first, first + depth)))
    return dataclasses.replace(spec, num_layers=depth, windows=(), moe=moe, state=None)
