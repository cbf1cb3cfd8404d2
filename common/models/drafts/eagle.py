"""EAGLE's draft network (arXiv:2401.15077; EAGLE-2, arXiv:2406.16858, has the same): decoder layers over a projection
of an embedding and a hidden state.

The first layer has no norm before its attention, and the last one no norm after it: its results are fed to the model's
own head, as they are (SafeAILab/EAGLE, eagle/model/cnets1.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ....kernels.gemm.dense_matmul import dense_matmul
from ...config.model import ModelSpec
from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.parallel import Parallel
from ...distributed.token_exchange import TokenExchange
from ...forward.step_context import StepContext
from ...layers.norm import NoNorm
from ...layers.vocab import VocabTable
from ...weights.slots import Allocate, Slot
from ..decoder.blocks import Blocks, Norm
from ..decoder.layer import DecoderLayer
from .network import DraftStates, joined_input


class EagleNetwork:
    """The decoder layers and their projection, with uninitialised weights. ``own_embed``: the checkpoint has an
    embedding, else ``embed`` is the model's; ``bias``: the projection has one."""

    depth = 1

    def __init__(self, spec: ModelSpec, parallel: Parallel, allocate: Allocate, blocks: Blocks, embed: VocabTable,
                 cos_sin: torch.Tensor, *, own_embed: bool, bias: bool):
        self._own_embed, self._embed, self._cos_sin = own_embed, embed, cos_sin
        self.fc = allocate(spec.hidden_size, 2 * spec.hidden_size)
        self.bias = allocate(spec.hidden_size) if bias else None

        def norm(name: str, size: int, allocate: Allocate, exchange: TokenExchange | None) -> Norm:
            return NoNorm() if name == "model.layers.0.input_layernorm" else blocks.norm(name, size, allocate, exchange)

        self.layers = [DecoderLayer(index, index, spec, parallel, allocate, dataclasses.replace(blocks, norm=norm))
                       for index in range(spec.num_layers)]

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def __call__(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor, step: StepContext,
                 trimmed: bool = False) -> DraftStates:
        projected = dense_matmul(joined_input(self._embed, ids, hidden), self.fc)
        if self.bias is not None:
            projected = projected + self.bias
        x: MaybeDeferred = projected
        residual: torch.Tensor | None = None
        for each in self.layers:
            x, residual = each(x, residual, step, self._cos_sin, trimmed and each is self.layers[-1])
        assert residual is not None
        states = residual + (x if isinstance(x, torch.Tensor) else x.reduce())
        return DraftStates(states, states)

    def slots(self) -> Iterator[Slot]:
        if self._own_embed:
            yield from self._embed.slots()
        for layer in self.layers:
            yield from layer.slots()
        yield Slot("fc.weight", self.fc, tuple(self.fc.shape))
        if self.bias is not None:
            yield Slot("fc.bias", self.bias, tuple(self.bias.shape))
