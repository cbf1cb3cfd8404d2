"""MTP draft layers: multi-token prediction (DeepSeek-V3, technical report, section 2.2) proposes tokens further
ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ....kernels.gemm.dense_matmul import dense_matmul
from ...config.model import ModelSpec
from ...distributed.parallel import Parallel
from ...forward.step_context import StepContext
from ...weights.slots import Allocate, Slot, allocator
from .blocks import Blocks
from .layer import DecoderLayer


class MTPDraftLayer:
    """One draft layer: computes hidden states of the next position from those of a position and the token after it.

    The model's own LM head computes their logits, and the next draft layer takes them. The first draft layer takes the
    model's hidden states after its final norm, which is what checkpoints were trained with.
    """

    def __init__(self, index: int, kv_layer: int, spec: ModelSpec, parallel: Parallel, allocate: Allocate,
                 blocks: Blocks):
        """Builds layer ``index`` of the checkpoint; its latents are layer ``kv_layer`` of the draft layers' pool."""
        name = f"model.layers.{index}"
        self._name = name
        self.token_norm = blocks.norm(f"{name}.enorm", spec.hidden_size, allocate, None)
        self.hidden_norm = blocks.norm(f"{name}.hnorm", spec.hidden_size, allocate, None)
        self.eh_proj = allocate(spec.hidden_size, 2 * spec.hidden_size)  # not quantized in float8 checkpoints either
        self.layer = DecoderLayer(index, kv_layer, spec, parallel, allocate, blocks)
        self.norm = blocks.norm(f"{name}.shared_head.norm", spec.hidden_size, allocate, None)

    def __call__(self, hidden: torch.Tensor, embeds: torch.Tensor, step: StepContext,
                 cos_sin: torch.Tensor) -> torch.Tensor:
        """Takes ``hidden`` [T, hidden] of positions and ``embeds`` [T, hidden], the embeddings of the tokens after
        them; returns ``[T, hidden]``. ``step`` is one of a batch at these positions."""
        joined = torch.cat([self.token_norm(embeds), self.hidden_norm(hidden)], dim=-1)
        x, residual = self.layer(dense_matmul(joined, self.eh_proj), None, step, cos_sin)
        return self.norm.add_norm(x, residual)[0]

    def slots(self) -> Iterator[Slot]:
        for module in (self.token_norm, self.hidden_norm, self.layer, self.norm):
            yield from module.slots()
        yield Slot(f"{self._name}.eh_proj.weight", self.eh_proj, tuple(self.eh_proj.shape))


def build_mtp_layers(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device,
                     blocks: Blocks) -> list[MTPDraftLayer]:
    """Builds the checkpoint's draft layers of ``blocks``, the first one next to the model, with uninitialised weights.
    All of them have experts where the model has any."""
    if spec.moe is not None:
        draft_layers = tuple(range(spec.num_layers, spec.num_layers + spec.mtp_layers))
        spec = dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, layers=spec.moe.layers + draft_layers))
    allocate = allocator(dtype, device, spec.quantization)
    return [MTPDraftLayer(spec.num_layers + kv_layer, kv_layer, spec, parallel, allocate, blocks)
            for kv_layer in range(spec.mtp_layers)]
