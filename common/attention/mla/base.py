"""Interface of the backends of multi-head latent attention, and functions that all of them share."""

from __future__ import annotations

from typing import Protocol

import torch

from ....kernels.attention.mla_rope_and_store import mla_rope_and_store
from ....kernels.attention.per_head_matmul import per_head_matmul
from ...config.mla import MLASpec
from ...forward.forward_batch import ForwardBatch
from ...kvcache.pool import KVPool
from ..base import AttentionPlanner


class LatentBackend(AttentionPlanner, Protocol):
    """``plan`` once a batch, as other backends do; the plan's ``run`` once a layer.

    ``run(layer, q, latent, k_rope, up, cos_sin)`` stores this step's latents in the pool, then attends; it returns
    ``[T, H, V]``. ``q`` [T, H, N + R], to whose last R values rope is applied (in place); ``latent`` [T, L],
    normalised; ``k_rope`` [T, R] without rope; ``up`` [H, N + V, L] makes a head's key and value of a latent;
    ``cos_sin`` [positions, R] float32 the rotary table. It mutates the pool and ``q``.
    """


class LatentFactory(Protocol):
    """A registered backend. Its file imports the library that it ``needs`` when it is made, not before."""

    takes_prompts: bool
    """True if it computes prompts too; else decode steps alone."""
    captures: bool
    """True if decode steps run under CUDA graphs."""

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where the backend cannot run."""

    def check_decode(self, device: torch.device, mla: MLASpec, dtype: str, stored: str) -> None:
        """Raises ConfigError where it cannot run decode steps of a model in ``dtype`` whose latents are ``stored`` in
        another type or the same."""

    def make(self, pool: KVPool, mla: MLASpec, num_heads: int, dtype: torch.dtype) -> LatentBackend:
        """Makes the backend; ``num_heads`` counts this rank's heads, ``dtype`` is the model's."""


def store(pool: KVPool, mla: MLASpec, batch: ForwardBatch, layer: int, q: torch.Tensor, latent: torch.Tensor,
          k_rope: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Apply rope and store a layer's latents, the part of ``run`` that all backends share; returns its pages."""
    pages = pool.latents(layer)
    page_scale, _ = pool.layout.scales_of(layer)
    mla_rope_and_store(q[..., mla.nope_dim:], latent, k_rope, pages, batch.page_of_token, batch.offset_in_page, cos_sin,
                       batch.positions, mla.interleaved, page_scale)
    return pages


def absorb(q: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """``[T, H, N] -> [T, H, L]``: queries whose scores with latents are those of ``q`` with the keys made of them."""
    return per_head_matmul(q[..., :nope_dim], up[:, :nope_dim])


def values_of(latents: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """``[T, H, L] -> [T, H, V]``: expands each head's values from (mean) latents."""
    return per_head_matmul(latents, up[:, nope_dim:].transpose(1, 2))
