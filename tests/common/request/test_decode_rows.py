"""A decode batch built at once equals the one built row by row, and the engine's host work stays small."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from baton.common.forward.forward_batch import DecodeRows, Row, build_decode_batch, build_forward_batch
from baton.tests.bench.step_host import Bench

CPU = torch.device("cpu")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pending", [0.0, 0.5, 1.0])
def test_built_at_once_or_row_by_row(page_size, pending):
    rng = np.random.default_rng(page_size)
    previous = torch.from_numpy(rng.integers(0, 1000, 40))
    rows = []
    for start in [0, page_size - 1, page_size, *rng.integers(0, 300, 20).tolist()]:
        pages = rng.integers(0, 10_000, start // page_size + 1 + int(rng.integers(0, 3)))  # may be longer than needed
        waits = rng.random() < pending
        rows.append(Row([] if waits else [int(rng.integers(0, 1000))], start, pages,
                        int(rng.integers(0, 40)) if waits else None))
    logits_rows = list(range(len(rows) - 2))
    want = build_forward_batch(rows, page_size, CPU, True, logits_rows, previous)
    got = build_decode_batch(DecodeRows([0 if row.pending_index is not None else row.token_ids[0] for row in rows],
                                        [row.start for row in rows], [row.page_ids for row in rows],
                                        [row.pending_index for row in rows]), page_size, CPU, logits_rows, previous)
    for field in dataclasses.fields(want):
        expected, actual = getattr(want, field.name), getattr(got, field.name)
        if isinstance(expected, torch.Tensor):
            assert actual.dtype == expected.dtype and torch.equal(actual, expected), field.name
        elif isinstance(expected, np.ndarray):
            assert actual.dtype == expected.dtype and np.array_equal(actual, expected), field.name
        else:
            assert actual == expected, field.name


def test_pages_that_do_not_cover_a_row_are_noticed():
    with pytest.raises(AssertionError, match="do not cover"):
        build_decode_batch(DecodeRows([1], [16], [np.array([3])], [None]), 16, CPU, [0], None)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_bench_of_host_time_runs_real_steps(sampled):
    bench = Bench(batch=3, context=20, steps=10, sampled=sampled)
    counted = bench.tracker.counters["generation_tokens"]
    bench.step()
    assert bench.tracker.counters["generation_tokens"] == counted + 3
    assert bench.sent.rids == ["0", "1", "2"]
    assert sampled or bench.sent.token_ids == [7, 7, 7]
