"""Latencies under the unified scheduler, on a virtual clock with an H200's costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.common.config.server import ScheduleArgs
from baton.tests.helpers.simulated_server import H200, SimulatedServer


def closed(requests: int, clients: int, input_len: int, output_len: int, costs=H200, **args) -> SimulatedServer:
    server = SimulatedServer(ScheduleArgs(**args), costs)
    server.closed_loop(requests, clients, input_len, output_len)
    assert server.scheduler.idle and all(len(asked.tokens) == output_len for asked in server.asked)
    server.batcher.cache.check_integrity()
    return server


@pytest.mark.parametrize(("load", "measured"), [
    ((768, 256, 1024, 256), {"req_s": 24.3, "ttft_p50": 3097, "ttft_p99": 6074, "tpot_p50": 29.1, "itl_p50": 17.3}),
    ((256, 64, 1024, 256), {"req_s": 18.8, "ttft_p50": 831, "ttft_p99": 1522, "tpot_p50": 10.1, "itl_p50": 7.35}),
])
def test_the_simulation_matches_the_machine(load, measured):
    """tests/bench/results/2026-11-21-unified.md; the median's wait is one of steps of 190 ms."""
    actual = closed(*load).figures()
    for name, value in measured.items():
        assert actual[name] == pytest.approx(value, rel=0.07), name


@pytest.mark.parametrize("request_ms", [0.5, 4.0, 12.0])
def test_clients_that_begin_together_stay_together(request_ms):
    """Each wave of prompts interrupts decode steps once, except for a few that arrive while no request waits: besides
    that, no more than one interval in a hundred is longer than a decode step, although requests arrive slowly."""
    server = closed(512, 256, 1024, 192, replace(H200, client_request=request_ms))
    gaps = np.concatenate([asked.gaps for asked in server.asked])
    assert np.percentile(gaps, 99) < 26.5
    assert len(list(server.interruptions())) <= 10
    assert server.figures()["req_s"] > 0.95 * closed(512, 256, 1024, 192).figures()["req_s"]


def test_a_prompt_is_computed_in_the_next_step_while_others_decode():
    """While 64 requests decode, a prompt that arrives alone waits for no more than the steps in flight."""
    server = SimulatedServer(ScheduleArgs())
    server.at_times([(0.0, 256, 900)] * 64 + [(2000.0 + 100 * i, 1024, 4) for i in range(20)])
    late = [asked.ttft for asked in server.asked[64:]]
    assert max(late) < 24.4 + 3 * 9.0
    stalls = server.asked[0].gaps[server.asked[0].gaps > 20]
    assert 19 <= len(stalls) <= 22 and max(stalls[1:]) < 24.4 + 2 * 9.0


def test_mixed_steps_stall_no_request_for_longer_than_a_step():
    server = closed(96, 32, 1024, 64, enable_mixed_chunk=True)
    assert max(asked.gaps.max() for asked in server.asked) < 8192 * H200.prompt + 2 * H200.decode(32, 40_000)
