"""The torch backend of latent attention in deterministic mode: in the absorbed form for all rows; see
``attention.fixed_tiles``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...config.mla import MLASpec
from ...forward.forward_batch import ForwardBatch
from ...kvcache.pool import KVPool
from ..base import gather
from ..fixed_tiles import FixedTiles
from ..workspace import AttentionWorkspace
from .base import absorb, store, values_of


class InvariantMLATorchBackend:
    attends_last_tokens = True

    def __init__(self, pool: KVPool, mla: MLASpec, num_heads: int):
        self.pool = pool
        self.mla = mla
        self._num_heads = num_heads

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> InvariantMLATorchPlan:
        return InvariantMLATorchPlan(self, batch, workspace, self._tiles(batch))

    def _tiles(self, batch: ForwardBatch) -> FixedTiles:
        dims = (self.mla.latent_dim, self.mla.kv_lora_rank)
        return FixedTiles(batch, self.pool.layout.page_size, self._num_heads, dims, None)

    def verifies(self, batch: ForwardBatch) -> bool:
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
                        cos_sin: torch.Tensor) -> torch.Tensor:
        assert batch.last_tokens is not None
        store(self.pool, self.mla, batch, layer, q, latent, k_rope, cos_sin)
        if not batch.last_tokens.num_reqs:
            return q.new_empty(0, q.shape[1], self.mla.v_dim)
        return self.attend(self._tiles(batch.last_tokens), layer, q[batch.logits_rows], up)

    def attend(self, tiles: FixedTiles, layer: int, q: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Attends to the stored latents of the tiles' batch."""
        pool, (scale, _) = self.pool.latents(layer), self.pool.layout.scales_of(layer)
        nope, rank = self.mla.nope_dim, self.mla.kv_lora_rank

        def tokens(pages: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys = gather(pool, (pages, offsets), torch.float32, scale)[:, :, None]  # [tiles, b, 1, TILE, L + R]
            return keys, keys[..., :rank]

        queries = torch.cat((absorb(q, up, nope), q[..., nope:]), dim=-1)
        latents = tiles.attend(queries, 1, self.mla.scale, tokens)
        return values_of(latents.to(q.dtype), up, nope)


@dataclass(eq=False)
class InvariantMLATorchPlan:
    """The tiles of a batch."""

    backend: InvariantMLATorchBackend
    batch: ForwardBatch
    workspace: AttentionWorkspace
    tiles: FixedTiles
    attends_last_tokens: bool = True

    def run(self, layer: int, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
            cos_sin: torch.Tensor) -> torch.Tensor:
        store(self.backend.pool, self.backend.mla, self.batch, layer, q, latent, k_rope, cos_sin)
        return self.backend.attend(self.tiles, layer, q, up)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self.backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        raise AssertionError("this backend is never captured")
