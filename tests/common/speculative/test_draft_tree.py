"""Candidate trees against a plain search over a table of probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.speculative.draft_tree import DraftTrees

VOCAB = 7


def logprobs_after(request: int, path: tuple[int, ...]) -> torch.Tensor:
    """The draft's distribution after a path; some tokens are certain, some impossible."""
    generator = torch.Generator().manual_seed(hash((request, *path)) % (1 << 31))
    logits = torch.randn(VOCAB, generator=generator) * 3
    if sum(path) % 3 == 0:
        logits[3] = 200.0
    if sum(path) % 4 == 1:
        logits[2] = float("-inf")
    return logits.log_softmax(-1)


def plain(request: int, topk: int, steps: int, limit: int) -> set[tuple[int, ...]]:
    """The paths that are drafted, found one after the other."""
    scored: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(steps):
        grown = []
        for path in frontier:
            values, tokens = logprobs_after(request, path).topk(topk)
            for value, token in zip(values.tolist(), tokens.tolist()):
                scored[(*path, token)] = scored[path] + min(value, -1e-4)
                grown.append((*path, token))
        frontier = sorted(grown, key=lambda path: -scored[path])[:topk]
    del scored[()]
    best = sorted(scored, key=lambda path: -scored[path])[:limit]
    return {path for path in best if scored[path] > float("-inf")}


def paths_of(drafts) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(drafts.tokens, drafts.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return set(paths)


@pytest.mark.parametrize("topk,steps,limits", [(2, 1, [2, 1]), (3, 3, [7, 7]), (2, 4, [9, 3]), (4, 2, [20, 5])])
def test_trees_are_those_of_a_plain_search(topk, steps, limits):
    trees = DraftTrees(2, topk)
    chosen = np.arange(2)
    rows: list[tuple[int, tuple[int, ...]]] = [(0, ()), (1, ())]
    for ahead in range(steps):
        values, tokens = torch.stack([logprobs_after(*row) for row in rows]).topk(topk)
        frontier = trees.add(chosen, tokens, values)
        grown = []
        for request in range(2):
            own = [path for owner, path in rows if owner == request]
            for place in range(topk):
                parent = own[int(frontier.parents[request, place])] if ahead else ()
                grown.append((request, (*parent, int(frontier.tokens[request, place]))))
                word, bit = int(frontier.words[request, place]), ahead * topk + place
                assert word.bit_count() == ahead + 1 and word >> bit == 1
        rows = grown
    for request, drafts in enumerate(trees.drafts(np.array(limits))):
        assert paths_of(drafts) == plain(request, topk, steps, limits[request])
        assert all(parent < index for index, parent in enumerate(drafts.parents))


def test_words_name_the_rows_of_ancestors():
    trees = DraftTrees(1, 2)
    trees.add(np.array([0]), torch.tensor([[5, 6]]), torch.tensor([[-1.0, -2.0]]))
    second = trees.add(np.array([0]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-5.0, -9.0], [-0.5, -9.0]]))
    assert second.tokens.tolist() == [[3, 1]] and second.parents.tolist() == [[1, 0]]
    assert [bin(word) for word in second.words[0].tolist()] == ["0b110", "0b1001"]
    (drafts,) = trees.drafts(np.array([3]))
    assert drafts.tokens == (5, 6, 3) and drafts.parents == (-1, -1, 1)


def test_requests_leave_between_passes():
    trees = DraftTrees(3, 2)
    trees.add(np.array([0, 2]), torch.tensor([[5, 6], [7, 8]]), torch.tensor([[-1.0, -2.0], [-1.0, -3.0]]))
    trees.keep(torch.tensor([1]))
    trees.add(np.array([2]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-0.1, -9.0], [-0.5, -9.0]]))
    first, none, last = trees.drafts(np.array([4, 4, 3]))
    assert none is None
    assert (first.tokens, first.parents) == ((5, 6), (-1, -1))
    assert (last.tokens, last.parents) == ((7, 1, 8), (-1, 0, -1)), "best first"
    assert trees.drafts(np.array([0, 0, 0])) == [None] * 3
