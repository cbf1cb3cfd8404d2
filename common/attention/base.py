"""What a model asks of an attention backend."""

from __future__ import annotations

from typing import Protocol

import torch

from ...kernels.arguments import HeadNorms
from ...kernels.attention.rope_and_store import rope_and_store
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool

ANY_LENGTH = 1 << 30
"""``plan``'s ``max_length`` for ends: pieces of requests are joined whatever they need, so that a server's warm-up
compiles that."""


class Planned(Protocol):
    """Any backend, as code sees it that runs none itself."""

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> None:
        """Prepare for ``batch``, a decode step or a ragged extend over existing prefixes.

        With ``max_length`` what is planned is captured into a graph, whose replays find other page tables in the
        batch's tensors, of sequences up to so many tokens. Only backends that can decode under capture take it. It is
        called twice: before the run that warms up, and before the one that is captured.
        """

    @property
    def attends_ends(self) -> bool:
        """Whether it has ``run_ends``."""

    def refresh(self, batch: ForwardBatch) -> None:
        """What a replay needs of the host: ``batch``, of a captured size, stands in the tensors that were captured."""


class AttentionBackend(Planned, Protocol):
    """Causal self-attention over the paged KV cache: ``plan`` once a batch, ``run`` once a layer. One is made for a
    window: of all tokens up to its own, a query sees the last so many (None: all)."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Store this step's keys and values in the pool, then attend; returns ``[T, Hq, D]``.

        ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D]; ``cos_sin`` [positions, D] float32, when given, is the rotary
        table by which ``q`` (in place) and ``k`` are turned on the way, ``norms`` what norms their heads before that.
        ``sinks`` [Hq] float32 are logits that join the denominators of the heads' softmaxes.
        Mutates the pool and ``q``.
        """

    def run_ends(self, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 cos_sin: torch.Tensor | None = None, norms: HeadNorms | None = None,
                 sinks: torch.Tensor | None = None) -> torch.Tensor:
        """``run`` for a model's last layer: keys and values of all rows are stored, but of ``batch``, which is planned
        and has ``ends``, these rows alone attend: ``[R, Hq, D]``. What comes next has to be planned."""


def store(pool: KVPool, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          cos_sin: torch.Tensor | None, norms: HeadNorms | None,
          settled: bool = False, turn_keys: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half of ``run``, equal for every backend; returns the layer's key and value pages. ``settled`` and
    ``turn_keys`` are as in ``rope_and_store``."""
    k_pages, v_pages = pool.layer(layer)
    k_scale, v_scale = pool.layout.scales_of(layer)
    rope_and_store(q, k, v, k_pages, v_pages, batch.page_of_token, batch.offset_in_page, cos_sin,
                   batch.positions, k_scale, v_scale, norms, settled, turn_keys)
    return k_pages, v_pages
