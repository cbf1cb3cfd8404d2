"""Accepted rows: on the host and on the device, of chains and trees, against a walk by definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.api.drafts import Drafts
from baton.common.speculative.verify import accept, accepted_rows
from baton.kernels.arguments import ChainPages, ChainState, PlacedChains
from baton.kernels.speculative.accept_chains import accept_chains
from baton.kernels.speculative.place_chains import place_rows
from baton.tests.helpers.random_drafts import random_chain, random_tree

FEW = 12  # tokens, so that a random sample often equals a draft


def by_definition(samples: list[int], drafts: Drafts | None) -> list[int]:
    """Rows of one request, from its own first one."""
    rows = [0]
    while drafts is not None:
        parents = drafts.parents or range(-1, len(drafts) - 1)
        children = [i + 1 for i, parent in enumerate(parents)
                    if parent + 1 == rows[-1] and drafts.tokens[i] == samples[rows[-1]] and samples[i + 1] >= 0]
        if not children:
            break
        rows.append(children[0])
    return rows


def random_step(seed: int) -> tuple[list[int], list[int], list[int], dict[int, Drafts]]:
    """Samples, the rows' tokens, sizes, and drafts of a step."""
    rng = np.random.default_rng(seed)
    drafts: dict[int, Drafts] = {}
    sizes, tokens, samples = [], [], []
    for request in range(int(rng.integers(1, 9))):
        kind, count = rng.integers(0, 4), int(rng.integers(1, 12))
        if kind:
            drafts[request] = (random_chain if kind == 1 else random_tree)(rng, count, FEW)
        found = drafts[request].tokens if kind else ()
        sizes.append(1 + len(found))
        tokens += [int(rng.integers(0, FEW)), *found]
        guesses = rng.integers(0, FEW, 1 + len(found))
        if kind:  # some samples are drafts
            for row in range(len(found)):
                parent = row - 1 if drafts[request].parents is None else drafts[request].parents[row]
                if rng.random() < 0.7:
                    guesses[parent + 1] = found[row]
        guesses[rng.random(len(guesses)) < 0.05] = -1
        samples += guesses.tolist()
    return samples, tokens, sizes, drafts


def on_device(samples: list[list[int]], tokens: list[list[int]]) -> list[tuple[int, int]]:
    """How many rows of each chain are accepted, and the newest token."""
    width, count = max(map(len, tokens)), len(tokens)
    pages = ChainPages(torch.arange(count + 1, dtype=torch.int32), torch.zeros(count, dtype=torch.int32), 16, 0, 16)
    padded = (torch.tensor([row + [0] * (width - len(row)) for row in rows]) for rows in (samples, tokens))
    sampled, ids = padded
    rows = place_rows(torch.zeros(count, dtype=torch.int64), ids, pages)
    valid = torch.tensor([len(row) for row in tokens])
    found = accept_chains(sampled.flatten(), PlacedChains(rows, valid, rows.positions + 1),
                          ChainState.empty(count, width - 1, torch.device("cpu")), pages, width - 1)
    return list(zip(found.counts.tolist(), found.newest.tolist()))


@pytest.mark.parametrize("seeds", [range(1000), range(1000, 2000)], ids=str)
def test_random_steps(seeds):
    lengths = set()
    for seed in seeds:
        samples, tokens, sizes, drafts = random_step(seed)
        begins = np.cumsum([0, *sizes[:-1]])
        want = [[begin + row for row in by_definition(samples[begin:begin + size], drafts.get(request))]
                for request, (begin, size) in enumerate(zip(begins.tolist(), sizes))]
        counts, rows = accepted_rows(samples, sizes, drafts)
        assert counts == list(map(len, want)) and rows == [row for path in want for row in path]
        assert accept(samples, sizes, drafts) == (counts, [samples[row] for row in rows])
        chains = [request for request, found in drafts.items() if found.parents is None]
        if chains:
            spans = [slice(int(begins[request]), int(begins[request]) + sizes[request]) for request in chains]
            assert on_device([samples[span] for span in spans], [tokens[span] for span in spans]) == [
                (counts[request], max(0, samples[want[request][-1]])) for request in chains]
        lengths.update(counts)
    assert lengths >= {1, 2, 3, 4, 5}


def test_a_row_that_failed_ends_the_walk_before_it():
    """Its request has not failed yet: a token before it may end the request."""
    chain = {0: Drafts((5, 6, 7))}
    assert accepted_rows([5, 6, -1, 8], [4], chain) == ([2], [0, 1])
    assert accepted_rows([-1, 6, 7, 8], [4], chain) == ([1], [0])
    assert accepted_rows([5, -1, 7, 8], [4], chain) == ([1], [0])

