"""Kernels of steps of chains against their twins, on a GPU or under the interpreter; collected by
test_kernels_interpreted.py and tests/gpu/kernels/test_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.speculative.simulated import SimulatedAcceptance
from baton.kernels import reference
from baton.kernels.arguments import ChainPages, ChainState, KnownChains, PlacedChains
from baton.kernels.speculative.accept_chains import accept_chains
from baton.kernels.speculative.place_chains import place_chains, place_rows
from baton.tests.kernels.kernel_cases import DEVICE, pytestmark

__all__ = ["pytestmark"]

SCRATCH, MAX_LENGTH = 999, 40


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def same(got: object, want: object) -> None:
    """Compares tensors, also in nested tuples."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor) and got.dtype == want.dtype
        assert got.tolist() == want.tolist()
    else:
        assert isinstance(got, tuple) and isinstance(want, tuple) and len(got) == len(want)
        for one, other in zip(got, want):
            same(one, other)


def pages_of(counts: list[int], page_size: int) -> ChainPages:
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = np.random.default_rng(1).permutation(200)[:indptr[-1]].astype(np.int32)
    return ChainPages(torch.from_numpy(indptr).to(DEVICE), torch.from_numpy(indices).to(DEVICE), page_size, SCRATCH,
                      MAX_LENGTH)


def state_of(rows: list[tuple[int, int, list[int]]], max_drafts: int) -> ChainState:
    """The state after requests with a position, a number of drafts and tokens each."""
    state = ChainState.empty(len(rows), max_drafts, torch.device(DEVICE))
    for row, (position, num_drafts, tokens) in enumerate(rows):
        state.positions[row], state.num_drafts[row] = position, num_drafts
        state.tokens[row, :len(tokens)] = torch.tensor(tokens)
    return state


@pytest.mark.parametrize("width", [1, 2, 4, 5])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_place_chains(page_size, width):
    """Requests of the state and of the host; without drafts, at their limits, beyond their pages and the context."""
    state = state_of([(5, 4, [50, 51, 52, 53, 54]), (37, 4, [60, 61, 62, 63, 64]), (9, 1, [70, 71]),
                      (20, 2, [80, 81, 82])], 4)
    sources = ints(2, -1, 0, 1, -1, 3)
    known = KnownChains(ints(0, 7, 0, 0, 30, 0), torch.arange(6 * width, device=DEVICE).view(6, width) + 100,
                        ints(0, width - 1, 0, 0, 0, 9))
    limits = ints(30, 9, 7, 40, 31, 20)
    pages = pages_of([-(-length // page_size) for length in (14, 12, 6, 38, 35, 18)], page_size)
    got = place_chains(state, sources, known, limits, pages)
    same(got, reference.place_chains(state, sources, known, limits, pages))
    assert got.rows.starts.tolist() == [9, 7, 5, 37, 30, 20]
    assert got.valid.tolist() == [min(width, bound) for bound in (2, 2, 2, 3, 1, 0)]
    ids = got.rows.input_ids.view(6, width)
    assert ids[0].tolist() == [70, 71, 0, 0, 0][:width] and ids[5].tolist() == [0] * width
    assert got.rows.positions.max() < MAX_LENGTH
    assert got.sample_positions.view(6, width)[:, 0].tolist() == [10, 8, 6, 38, 31, 21]
    lengths = (pages.kv_indptr.diff() - 1) * page_size + got.rows.kv_last_page_len
    assert (lengths <= pages.kv_indptr.diff() * page_size).all()
    fits = pages.kv_indptr.diff() * page_size >= got.rows.starts + width
    assert (lengths == got.rows.starts + width)[fits].all()
    for request, page in enumerate(got.rows.page_of_token.view(6, width).tolist()):
        own = pages.kv_indices[pages.kv_indptr[request]:pages.kv_indptr[request + 1]].tolist()
        index = [(int(got.rows.starts[request]) + row) // page_size for row in range(width)]
        assert page == [own[i] if i < len(own) else SCRATCH for i in index]


def test_place_rows():
    pages = pages_of([3, 1, 2], 4)
    starts, tokens = ints(7, 0, 6), ints([1, 2, 3], [4, 5, 6], [7, 8, 9])
    got = place_rows(starts, tokens, pages)
    same(got, reference.place_rows(starts, tokens, pages))
    assert got.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert got.positions.tolist() == [7, 8, 9, 0, 1, 2, 6, 7, 8]
    assert got.kv_last_page_len.tolist() == [2, 3, 4]  # the last one's length is that of its pages


def placed_of(starts: list[int], ids: list[list[int]], valid: list[int], pages: ChainPages) -> PlacedChains:
    rows = reference.place_rows(ints(*starts), ints(*ids), pages)
    return PlacedChains(rows, ints(*valid), rows.positions + 1)


def test_accept_chains():
    """All drafts, some, none, no valid row; rows that have failed; a draft that would be accepted but is void."""
    ids = [[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 0], [5, 6, 7]]
    samples = [[6, 7, 8], [6, 8, 9], [9, 7, 8], [6, 7, 8], [-1, 7, 8], [6, -1, 8], [6, 7, 8]]
    valid, starts = [3, 3, 3, 0, 3, 3, 2], [0, 3, 11, 30, 8, 36, 39]
    pages = pages_of([2, 3, 4, 8, 3, 10, 10], 4)
    states = [state_of([(0, 0, [])] * 9, 4) for _ in range(2)]
    placed = placed_of(starts, ids, valid, pages)
    got, want = (op(ints(*samples).flatten(), placed, state, pages, 2)
                 for op, state in zip((accept_chains, reference.accept_chains), states))
    same(got, want)
    assert states[0].packed.tolist() == states[1].packed.tolist() and not states[0].packed[7:].any()
    assert got.counts.tolist() == [3, 2, 1, 0, 1, 1, 2]
    assert got.newest.tolist() == [8, 8, 9, 5, 0, 6, 7]
    assert got.positions.tolist() == [3, 5, 12, 30, 9, 37, 41]
    assert got.last_rows.tolist() == [2, 4, 6, 9, 12, 15, 19]
    assert got.newest_rows.tolist() == [3, 6, 9, 12, 17, 21, 26]
    assert got.kv_last_page_len.tolist() == [-1, -3, 0, 2, 1, 1, 4]  # the last one's length is that of its pages
    assert got.next_ids.tolist() == [max(0, sample) for row in samples for sample in row]
    assert got.sequences.tolist() == [[5, *(max(0, sample) for sample in row)] for row in samples]
    assert states[0].samples[:7, :3].tolist() == samples and states[0].num_drafts[:7].tolist() == [2] * 7
    assert got.passes.positions.tolist() == [[min(start + ahead, MAX_LENGTH - 1) for start in got.positions.tolist()]
                                             for ahead in range(3)]
    assert got.passes.kv_last_page_len[:, 1].tolist() == [-2, -1, 0]  # more pages than tokens


def test_accept_rows_without_drafts():
    pages = pages_of([2, 3, 4], 4)
    states = [state_of([(0, 0, [])] * 3, 4) for _ in range(2)]
    placed = placed_of([3, 11, 7], [[5], [6], [7]], [1, 1, 0], pages)
    got, want = (op(ints(8, -1, 9), placed, state, pages, 0)
                 for op, state in zip((accept_chains, reference.accept_chains), states))
    same(got, want)
    assert states[0].packed.tolist() == states[1].packed.tolist() and states[0].num_drafts.tolist() == [0, 0, 0]
    assert got.counts.tolist() == [1, 1, 0] and got.newest.tolist() == [8, 0, 7]
    assert got.positions.tolist() == [4, 12, 7] == got.passes.positions[0].tolist()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_accept_chains_simulated(width):
    """The drawn numbers of drafts are accepted, whatever was sampled: those that the host would draw."""
    count, seed, survival = 64, 7, [0.9, 0.5, 0.4, 0.1]
    generator = np.random.default_rng(0)
    ids, samples = (generator.integers(0, 3, (count, width)) for _ in range(2))
    starts, valid = generator.integers(0, 30, count), generator.integers(0, width + 1, count)
    rids = [f"request {i}" for i in range(count)]
    acceptance = SimulatedAcceptance(survival, seed)
    simulated = acceptance.on_device(count + 9, torch.device(DEVICE))
    simulated.keys[:count] = torch.from_numpy(acceptance.keys(rids).view(np.int64))
    pages = pages_of([1] * count, 64)
    states = [state_of([(0, 0, [])] * count, 4) for _ in range(2)]
    placed = placed_of(starts.tolist(), ids.tolist(), valid.tolist(), pages)
    drawn = torch.from_numpy(samples).to(DEVICE).flatten()
    got, want = (op(drawn, placed, state, pages, 4, simulated)
                 for op, state in zip((accept_chains, reference.accept_chains), states))
    same(got, want)
    assert states[0].packed.tolist() == states[1].packed.tolist()
    expected = acceptance.count(rids, starts, np.maximum(valid - 1, 0)) + (valid > 0)
    assert got.counts.tolist() == expected.tolist()
