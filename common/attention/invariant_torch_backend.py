"""The torch backend of deterministic mode; see fixed_tiles.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.arguments import HeadNorms
from ..config.scores import PLAIN_SCORES, Scores
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from .base import gather, store
from .fixed_tiles import FixedTiles
from .workspace import AttentionWorkspace


class InvariantTorchBackend:
    attends_last_tokens = True

    def __init__(self, pool: KVPool, num_heads: int, window: int | None, scores: Scores = PLAIN_SCORES):
        self.pool = pool
        self._scale, self._softcap = scores.scale_of(pool.layout.head_dim), scores.softcap
        self._window = window
        self._heads = pool.layout.num_kv_heads
        self._group = num_heads // self._heads

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> InvariantTorchPlan:
        return InvariantTorchPlan(self, batch, workspace, self._tiles(batch))

    def _tiles(self, batch: ForwardBatch) -> FixedTiles:
        layout = self.pool.layout
        return FixedTiles(batch, layout.page_size, self._group, (layout.head_dim, layout.head_dim), self._window)

    def verifies(self, batch: ForwardBatch) -> bool:
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
                        norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert batch.last_tokens is not None
        store(self.pool, batch, layer, q, k, v, cos_sin, norms)
        if not batch.last_tokens.num_reqs:
            return q[:0]
        return self.attend(self._tiles(batch.last_tokens), layer, q[batch.logits_rows], sinks)

    def attend(self, tiles: FixedTiles, layer: int, q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attends to the stored keys and values of the tiles' batch."""
        k_pages, v_pages = self.pool.layer(layer)
        scales = self.pool.layout.scales_of(layer)

        def tokens(pages: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = (_tokens(x, pages, offsets, scale) for x, scale in zip((k_pages, v_pages), scales))
            return k, v

        return tiles.attend(q, self._heads, self._scale, tokens, sinks, self._softcap).to(q.dtype)


@dataclass(eq=False)
class InvariantTorchPlan:
    """The tiles of a batch."""

    backend: InvariantTorchBackend
    batch: ForwardBatch
    workspace: AttentionWorkspace
    tiles: FixedTiles
    attends_last_tokens: bool = True

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        store(self.backend.pool, self.batch, layer, q, k, v, cos_sin, norms)
        return self.backend.attend(self.tiles, layer, q, sinks)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self.backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        raise AssertionError("this backend is never captured")


def _tokens(pool: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, scale: float) -> torch.Tensor:
    """Gathers tokens of ``[pages, heads, page_size, D]`` to float32 ``[tiles, b, heads, TILE, D]``."""
    return gather(pool, (pages, slice(None), offsets), torch.float32, scale).movedim(3, 2).contiguous()
