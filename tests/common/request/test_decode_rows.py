"""The bench of the engine's host work runs real steps."""

from __future__ import annotations

import pytest

from baton.tests.bench.step_host import Bench


@pytest.mark.parametrize("sampled", [False, True])
def test_the_bench_of_host_time_runs_real_steps(sampled):
    bench = Bench(batch=3, context=20, steps=10, sampled=sampled)
    counted = bench.tracker.counters["generation_tokens"]
    bench.step()
    assert bench.tracker.counters["generation_tokens"] == counted + 3
    assert bench.sent.rids == ["0", "1", "2"]
    assert sampled or bench.sent.token_ids == [7, 7, 7]
