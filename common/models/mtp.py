"""Multi-token prediction (DeepSeek-V3, technical report, section 2.2): layers that foretell tokens further ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ...kernels.gemm.dense_matmul import dense_matmul
from ..attention.base import AttentionPlanner
from ..config.model import ModelSpec
from ..distributed.parallel import Parallel
from ..layers.norm import RMSNorm
from ..weights.slots import Allocate, Slot, allocator
from .deepseek import LatentSelfAttention
from .layer import DecoderLayer
from .moe import mixed_mlp


class MTPDraftLayer:
    """From what is known of a position and the token behind it to what is known of that token: rows that the model's
    own head scores, and that the next predictor takes.

    The first one takes hidden states from behind the model's last norm, which is what checkpoints were trained with.
    """

    def __init__(self, index: int, place: int, spec: ModelSpec, parallel: Parallel, allocate: Allocate):
        """Layer ``index`` of the checkpoint; its latents are layer ``place`` of the predictors' pool."""
        name = f"model.layers.{index}"
        self._name = name
        self.token_norm = RMSNorm(f"{name}.enorm", spec.hidden_size, spec.rms_norm_eps, allocate)
        self.hidden_norm = RMSNorm(f"{name}.hnorm", spec.hidden_size, spec.rms_norm_eps, allocate)
        self.join = allocate(spec.hidden_size, 2 * spec.hidden_size)  # of the engine's type in float8 checkpoints, too
        self.layer = DecoderLayer(index, place, spec, parallel, allocate, mixed_mlp(parallel.experts),
                                  LatentSelfAttention)
        self.norm = RMSNorm(f"{name}.shared_head.norm", spec.hidden_size, spec.rms_norm_eps, allocate)

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor, attention: AttentionPlanner,
                 cos_sin: torch.Tensor) -> torch.Tensor:
        """``hidden`` [T, hidden] of positions and ``tokens`` [T, hidden], the embeddings of the tokens behind them, to
        ``[T, hidden]``. ``attention`` has planned a batch at these positions."""
        joined = torch.cat([self.token_norm(tokens), self.hidden_norm(hidden)], dim=-1)
        x, residual = self.layer(dense_matmul(joined, self.join), None, attention, cos_sin)
        return self.norm.add(x, residual)[0]

    def slots(self) -> Iterator[Slot]:
        for module in (self.token_norm, self.hidden_norm, self.layer, self.norm):
            yield from module.slots()
        yield Slot(f"{self._name}.eh_proj.weight", self.join, tuple(self.join.shape))


def token_predictors(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype,
                     device: torch.device) -> list[MTPDraftLayer]:
    """Those that the checkpoint holds, the first one nearest to the model; their weights are uninitialised."""
    if spec.moe is not None:
        behind = tuple(range(spec.num_layers, spec.num_layers + spec.mtp_layers))
        spec = dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, layers=spec.moe.layers + behind))
    allocate = allocator(dtype, device, spec.quantization)
    return [MTPDraftLayer(spec.num_layers + place, place, spec, parallel, allocate)
            for place in range(spec.mtp_layers)]
