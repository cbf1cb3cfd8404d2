"""Batches whose rows are trees of drafts, and their attention by plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.common.forward.forward_batch import BatchColumns, ForwardBatch, MaskColumns, Row, model_input


def random_tree(size: int, generator: np.random.Generator) -> list[int]:
    """Parents [size] of the nodes of a tree, whose first is the root."""
    return [-1, *(int(generator.integers(node)) for node in range(1, size))][:size]


def words_of(parents: Sequence[int]) -> list[int]:
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    return words


def tree_columns(prefixes: Sequence[int], trees: Sequence[Sequence[int]], pages: Sequence[np.ndarray], page_size: int,
                 further: Sequence[Sequence[np.ndarray]] = ()) -> BatchColumns:
    """A step of requests with these prefixes whose rows are the nodes of ``trees``, by their parents."""
    rows = [Row([0] * len(tree), prefix, ids, further=[group[b] for group in further])
            for b, (prefix, tree, ids) in enumerate(zip(prefixes, trees, pages))]
    columns = model_input(rows, page_size).columns
    words = [words_of(tree) for tree in trees]
    positions = [prefix + word.bit_count() - 1 for prefix, tree in zip(prefixes, words) for word in tree]
    mask = MaskColumns(np.array([word for tree in words for word in tree], np.int64),
                       np.array([len(tree) for tree in trees], np.int32))
    return columns._replace(positions=np.array(positions, np.int64), verifies=True, mask=mask)


def batch_of(columns: BatchColumns, device: torch.device) -> ForwardBatch:
    return ForwardBatch.from_columns(columns, torch.zeros(columns.num_tokens, dtype=torch.int64, device=device), device)
