"""Closed forms against the simulator: means within a few percent while servers keep up."""

import subprocess
import sys
import time

import pytest

from baton.simulate.costs.model import load
from baton.simulate.predict import Traffic, _erlang_b, _wait, predict, smallest_pair
from baton.simulate.results.figures import figures
from baton.simulate.workload.synthetic import Lengths, synthetic
from baton.simulate.world.cluster import ClusterSpec, simulate

COSTS = load("llama-3-8b-h200")


@pytest.mark.parametrize("rate, input_len, output_len, cluster", [
    (8, 1024, 200, {"unified": 1}), (12, 1024, 200, {"prefill": 1, "decode": 1}),
    (6, 4096, 100, {"prefill": 1, "decode": 1}), (14, 4096, 100, {"prefill": 2, "decode": 1}),
    (20, 1024, 200, {"unified": 2})])
def test_means_agree_with_the_simulation(rate, input_len, output_len, cluster):
    requests = synthetic(rate, 500, Lengths(input_len, 0.6), Lengths(output_len, 0.6), seed=3)
    predicted = predict(COSTS, Traffic.of(requests), **cluster)
    found = figures(simulate(requests, ClusterSpec(COSTS, **cluster)))
    assert predicted.stable
    assert predicted.ttft_mean == pytest.approx(found.ttft.mean, rel=0.2)
    assert predicted.tpot_mean == pytest.approx(found.tpot.mean, rel=0.12)
    assert predicted.e2e_mean == pytest.approx(found.e2e.mean, rel=0.12)
    assert 0.5 < predicted.ttft_p99 / found.ttft.p99 < 1.8
    assert predicted.batch == pytest.approx(found.servers[-1].mean_batch, rel=0.25)


def test_a_single_server_waits_as_kingman_says():
    """One server, exponential times: the mean wait is usage / (1 - usage) services."""
    mean, p99 = _wait(10.0, 0.8, 1, 1.0)
    assert mean == pytest.approx(40.0) and p99 == pytest.approx(50 * 4.382, rel=1e-3)
    assert _wait(10.0, 0.8, 1, 0.5)[0] == pytest.approx(20.0)
    assert _erlang_b(2, 1.0) == pytest.approx(0.2)


@pytest.mark.parametrize("rate, cluster", [(60, {"unified": 1}), (60, {"prefill": 1, "decode": 4}),
                                           (400, {"prefill": 20, "decode": 1})])
def test_overload_is_said(rate, cluster):
    predicted = predict(COSTS, Traffic(rate, 1024, 256), **cluster)
    assert not predicted.stable and predicted.ttft_mean == float("inf")


def test_more_servers_and_cached_prompts_never_slow_down():
    traffic = Traffic(20, 2048, 256, 0.5, 0.5)
    by_prefills = [predict(COSTS, traffic, prefill=count, decode=2).ttft_mean for count in (2, 3, 4, 6)]
    assert by_prefills == sorted(by_prefills, reverse=True)
    by_decodes = [predict(COSTS, traffic, prefill=3, decode=count).tpot_mean for count in (1, 2, 3)]
    assert by_decodes == sorted(by_decodes, reverse=True)
    cached = predict(COSTS, Traffic(20, 2048, 256, 0.5, 0.5, cached=0.5), prefill=2, decode=2)
    assert cached.ttft_mean < by_prefills[0] and cached.prefill_usage < 0.6 * 2


def test_a_prediction_takes_less_than_milliseconds():
    traffic = Traffic(20, 2048, 256, 0.5, 0.5)
    begin = time.process_time()
    for _ in range(50):
        predict(COSTS, traffic, prefill=3, decode=2)
    assert (time.process_time() - begin) / 50 < 5e-3


def test_predictions_need_neither_torch_nor_numpy():
    code = ("import sys, baton.simulate.predict, baton.simulate.costs.model as model; model.load('llama-3-8b-h200'); "
            "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_smallest_pair_grows_with_the_load_and_keeps_its_limits():
    gpus = []
    for rate in (2, 10, 40, 80):
        size = smallest_pair(COSTS, Traffic(rate, 2048, 200, 0.6, 0.6), ttft_ms=400, tpot_ms=12)
        assert size.predicted.ttft_p99 <= 400 and size.predicted.tpot_p99 <= 12 and size.predicted.prefill_usage <= 0.85
        gpus.append(size.prefill + size.decode)
    assert gpus == sorted(gpus) and gpus[0] == 2 < gpus[-1]
    assert smallest_pair(COSTS, Traffic(80, 2048, 200), ttft_ms=400, max_gpus=3) is None
    assert smallest_pair(COSTS, Traffic(1, 2048, 200), tpot_ms=1) is None
    wide = smallest_pair(load("llama-3-8b-h200-tp2"), Traffic(20, 2048, 200), ttft_ms=400, prefill_costs=COSTS)
    assert wide.decode >= 1 and wide.predicted.tpot_mean < size.predicted.tpot_mean


def test_the_smallest_pair_serves_what_it_promises():
    """The simulation of the size that the closed form names: within the limits, or a little above."""
    requests = synthetic(20, 500, Lengths(2048, 0.6), Lengths(200, 0.6), seed=5)
    size = smallest_pair(COSTS, Traffic.of(requests), ttft_ms=500, tpot_ms=12)
    found = figures(simulate(requests, ClusterSpec(COSTS, prefill=size.prefill, decode=size.decode)))
    assert found.ttft.p99 < 500 * 1.2 and found.tpot.p99 < 12 * 1.2
