"""Trees of drafts: the passes of a drafter that expand several candidates of each request at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...api.drafts import Drafts
from ...config.server.speculative import SpeculativeArgs
from ...forward.forward_batch import ForwardBatch
from ...forward.host_copies import upload_joined
from ..base import DraftStep
from ..draft_tree import DraftTrees, Frontier
from .chains import StepRows
from .pages import DraftPages


@dataclass(frozen=True)
class TreeShape:
    """Sizes of trees: ``topk`` candidates are expanded by each of ``num_steps`` passes but the first, and at most
    ``num_drafts`` are drafted."""

    topk: int
    num_steps: int
    num_drafts: int

    def passes(self, slots: np.ndarray) -> np.ndarray:
        """Returns the passes [n] of requests that have ``slots`` [n] for candidates."""
        passes: np.ndarray = np.minimum(self.num_steps, 1 + slots // self.topk)
        return passes


def tree_shape(args: SpeculativeArgs) -> TreeShape:
    """Returns the sizes that the flags ask for."""
    return TreeShape(args.topk, args.num_steps, args.num_drafts)


Compute = Callable[[ForwardBatch, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes a pass: its batch, its tokens [rows] int64, and of each the row of the last pass that it follows [rows];
returns logits [rows, V]."""


def grow_trees(step: DraftStep, rows: StepRows, shape: TreeShape, token_ids: torch.Tensor | None,
               logits: torch.Tensor | None, first_slots: np.ndarray, page_size: int,
               compute: Compute) -> list[Drafts | None]:
    """Returns the drafts of each request of a step.

    ``logits`` [m, V] come after the last rows of the m requests with a limit. Their candidates are stored in the slots
    from ``first_slots`` [n] on, which is also the position of the first of them.
    """
    trees = DraftTrees(len(rows.requests), shape.topk)
    current = np.flatnonzero(rows.limits > 0)
    if logits is None or not len(current):
        return [None] * len(rows.requests)
    # Pages reach ``limits`` slots after a request's last row.
    passes, topk = shape.passes(rows.positions + rows.limits + 1 - first_slots), shape.topk

    def sample(logits: torch.Tensor, ahead: int) -> Frontier:
        width = len(logits) // len(current)
        positions = np.repeat(rows.positions[current] + 2 + ahead, width)
        found = step.sampler.sample(logits, np.repeat(rows.requests[current], width).tolist(), positions.tolist(), topk,
                                    token_ids)
        return trees.add(current, *found)

    frontier, going = sample(logits, 0), current[passes[current] > 1]
    if not len(going):
        return trees.drafts(np.minimum(rows.limits, shape.num_drafts))
    pages = DraftPages(rows.page_tables(going), first_slots[going] + (passes[going] - 1) * topk - 1, page_size,
                       logits.device)
    width = 1
    for ahead in range(1, int(passes[going].max())):
        places = np.flatnonzero(passes[current] > ahead)
        kept = upload_joined([places], torch.int64, logits.device)
        if len(places) < len(current):
            trees.keep(kept)
            current, frontier = current[places], Frontier(*(column[kept] for column in frontier))
        batch = pages.tree_batch(np.searchsorted(going, current), first_slots[current], ahead, topk, frontier)
        parents = (kept[:, None] * width + frontier.parents).flatten()
        frontier, width = sample(compute(batch, frontier.tokens.flatten(), parents), ahead), topk
    return trees.drafts(np.minimum(rows.limits, shape.num_drafts))
