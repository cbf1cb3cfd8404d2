"""Simulated clusters: skipped steps equal those that run, every request ends once, seeds decide everything."""

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import ScheduleArgs
from baton.router.config.policy import PolicyArgs
from baton.simulate.costs.model import load
from baton.simulate.results.figures import figures
from baton.simulate.workload.request import SimRequest
from baton.simulate.workload.synthetic import Lengths, synthetic
from baton.simulate.world.cluster import ClusterSpec, simulate, simulate_closed

COSTS = load("llama-3-8b-h200")
CLUSTERS = {"1U": {"unified": 1}, "1P1D": {"prefill": 1, "decode": 1}, "2P1D": {"prefill": 2, "decode": 1}}


def times(run):
    return np.array([(outcome.first, outcome.last) for outcome in run.outcomes])


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("pool_tokens", [None, 12_000], ids=["roomy", "full"])
def test_skipped_steps_equal_steps_that_run(cluster, pool_tokens):
    """With a full pool requests wait, are retracted and evict cached pages."""
    requests = synthetic(9, 60, Lengths(900, 0.7, 4000), Lengths(150, 0.8, 700), cv=1.5, groups=4, shared=512, seed=3)
    spec = ClusterSpec(COSTS, **cluster, pool_tokens=pool_tokens)
    skipping, stepping = (simulate(requests, spec, skips=skips) for skips in (True, False))
    assert sum(server.num_decode_steps for server in skipping.servers) == sum(
        server.num_decode_steps for server in stepping.servers)
    assert skipping.num_events < stepping.num_events
    np.testing.assert_allclose(times(skipping), times(stepping), atol=1e-7)
    assert [outcome.cached for outcome in skipping.outcomes] == [outcome.cached for outcome in stepping.outcomes]


@pytest.mark.parametrize("cluster", [{"unified": 2}, {"prefill": 2, "decode": 2}], ids=["2U", "2P2D"])
def test_every_request_ends_once_with_all_tokens(cluster):
    """Also those whose prompts and answers barely fit; loads at the router return to zero."""
    rng = np.random.default_rng(5)
    for seed in range(4):
        requests = synthetic(float(rng.uniform(1, 40)), 50, Lengths(700, 1.0, 5000), Lengths(60, 1.0, 900),
                             cv=float(rng.uniform(0, 3)), seed=seed)
        spec = ClusterSpec(COSTS, **cluster, pool_tokens=8000, policy=PolicyArgs(policy="power_of_two"),
                           schedule=ScheduleArgs(max_running_requests=12, enable_mixed_chunk=seed % 2 == 1))
        run = simulate(requests, spec, seed=seed)
        assert [outcome.num_tokens for outcome in run.outcomes] == [request.output_len for request in requests]
        assert all(outcome.sent < outcome.first <= outcome.last for outcome in run.outcomes)
        found = figures(run)
        assert found.output_tokens == sum(request.output_len for request in requests)
        assert round(found.itl.count) == found.output_tokens - len(requests)


def test_requests_that_fit_no_pool_fail_alone():
    requests = [SimRequest(0.0, 500, 10), SimRequest(0.1, 5000, 10), SimRequest(0.2, 500, 10)]
    run = simulate(requests, ClusterSpec(COSTS, unified=1, pool_tokens=2000))
    assert [bool(outcome.error) for outcome in run.outcomes] == [False, True, False]


def test_equal_seeds_give_equal_times():
    requests = synthetic(12, 80, Lengths(800, 0.5), Lengths(100, 0.5), seed=1)
    spec = ClusterSpec(COSTS, prefill=2, decode=2, policy=PolicyArgs(policy="random"))
    first, again, other = (times(simulate(requests, spec, seed=seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_shared_prefixes_are_found_in_caches():
    requests = synthetic(4, 60, Lengths(256), Lengths(16), groups=2, shared=2048, seed=2)
    cached = figures(simulate(requests, ClusterSpec(COSTS, unified=1))).hit_rate
    pairs = figures(simulate(requests, ClusterSpec(COSTS, prefill=1, decode=1))).hit_rate
    without = figures(simulate(requests, ClusterSpec(COSTS, unified=1, prefix_cache=False))).hit_rate
    assert without == 0 and cached == pytest.approx(pairs, abs=0.02)
    assert 0.8 < cached < 2048 / (2048 + 256)


def test_an_empty_server_answers_in_the_time_of_its_parts():
    """One request: its prompt's step, transfer, and the time around the engine."""
    steps, around, link = COSTS.steps, COSTS.requests, COSTS.transfer
    request = [SimRequest(0.0, 4096, 101)]
    unified = simulate(request, ClusterSpec(COSTS, unified=1)).outcomes[0]
    outside = around.request + around.router + around.api_token + around.answer
    assert unified.ttft * 1e3 == pytest.approx(steps.prompt(4096) + outside, abs=0.01)
    assert unified.tpot * 1e3 == pytest.approx(steps.decode(1, 4096 + 51), rel=2e-3)
    pair = simulate(request, ClusterSpec(COSTS, prefill=1, decode=1)).outcomes[0]
    shown = pair.ttft * 1e3 - steps.prompt(4096) - outside
    last_group = 4096 * link.bytes_per_token / link.layer_groups / link.bandwidth / 1e6
    assert last_group + link.latency < shown < last_group + link.latency + 4 * link.message + 2.0


def test_closed_loops_reach_what_was_measured():
    """bench_serving at 64 clients, 1024/256: 20.4 req/s on one H200 (tests/bench/results/2026-11-22-unified.json) and
    28.8 on a pair (docs/benchmarks.md: 7,379 tok/s), whose decode steps writes of KV pages delay."""
    requests = [SimRequest(0.0, 1024, 256)] * 256
    unified = figures(simulate_closed(requests, 64, ClusterSpec(COSTS, unified=1, prefix_cache=False)))
    pair = figures(simulate_closed(requests, 64, ClusterSpec(COSTS, prefill=1, decode=1, prefix_cache=False)))
    assert unified.rate(unified.completed) == pytest.approx(20.4, rel=0.05)
    assert pair.rate(pair.completed) == pytest.approx(28.8, rel=0.12)


def test_simulation_is_far_faster_than_real_time():
    requests = synthetic(2, 100, Lengths(1024), Lengths(256), seed=0)
    assert simulate(requests, ClusterSpec(COSTS, prefill=1, decode=1)).speed > 15


@pytest.mark.parametrize("wrong", [{}, {"prefill": 1}, {"unified": 1, "prefill": 1, "decode": 1}, {"unified": -1}])
def test_clusters_that_do_not_exist_are_refused(wrong):
    with pytest.raises(ConfigError, match="--prefill|--unified"):
        ClusterSpec(COSTS, **wrong)


def test_policies_that_read_more_than_a_workload_has_are_refused():
    with pytest.raises(ConfigError, match="cache_exact cannot be simulated"):
        simulate([], ClusterSpec(COSTS, prefill=1, decode=1, policy=PolicyArgs(policy="cache_exact")))


@pytest.mark.parametrize("cluster", [{"unified": 1}, {"prefill": 1, "decode": 1}])
def test_the_schedulers_flags_count(cluster):
    """Without overlap the device waits for the host; small chunks make more steps; few running requests make others
    wait; every order of waiting requests serves all."""
    requests = synthetic(14, 60, Lengths(1500, 0.5), Lengths(80, 0.5), seed=4)

    def run(**flags):
        return figures(simulate(requests, ClusterSpec(COSTS, **cluster, schedule=ScheduleArgs(**flags))))

    usual, without = run(), run(disable_overlap_schedule=True)
    assert without.tpot.mean > usual.tpot.mean * 1.02
    steps = [sum(server.num_prefill_steps for server in each.servers)
             for each in (usual, run(chunked_prefill_size=256))]
    assert steps[1] > 2 * steps[0]
    assert run(max_running_requests=2).ttft.mean > usual.ttft.mean * 1.5
    for policy in ("lpm", "lof", "random", "slo"):
        assert run(schedule_policy=policy).completed == len(requests)
