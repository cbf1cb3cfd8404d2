"""A pair in one process whose decode server runs out of slots and pages: preempted requests resume where they were."""

import time

import numpy as np
import pytest

from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.integration.transfer.test_relay_in_process import (  # noqa: F401 (fixtures)
    VOCAB,
    Side,
    bootstrap_port,
    checkpoint,
    run,
    tokens_of,
)

PREEMPT = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 0}


@pytest.fixture(scope="module")
def pair(checkpoint, bootstrap_port):  # noqa: F811
    common = {"port": bootstrap_port, "backend": "fake", "overlap": True}
    prefill = Side(checkpoint, make_prefill, "prefill", chunk=23, schedule=PREEMPT, **common)
    decode = Side(checkpoint, make_decode, "decode", max_total_tokens=400,
                  schedule=PREEMPT | {"retract_host_memory_gb": 0.002, "max_running_requests": 5}, **common)
    decode.scheduler.batcher.rates._link_bandwidth = 1e18  # pretend that host memory costs nothing
    prefill.start_at = bootstrap_port
    yield prefill, decode
    prefill.scheduler.close()
    decode.scheduler.close()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(4)
    return [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(10, 70, 12)]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):  # noqa: F811
    side = Side(checkpoint, lambda parts: UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=False),
                "null", 0, "fake")
    for i, prompt in enumerate(prompts):
        side.start(str(i), prompt, max_new_tokens=30)
    run(side)
    return tokens_of(side.take()[0])


def begin(pair, number, prompts, priority, room):
    for side in pair:
        side.start(str(number), prompts[number], room=room + number, port=pair[0].start_at, max_new_tokens=30,
                   fields={"priority": priority})


def until(pair, condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        worked = [side.scheduler.step(0.0) for side in pair]
        if not any(worked):
            time.sleep(0.001)
        batcher = pair[1].scheduler.batcher
        taken = len(batcher.running) + len(batcher.prefilling) + len(batcher.transferring)
        assert taken <= batcher.args.max_running_requests, "transferring requests have slots too"


def test_urgent_requests_preempt_others(pair, prompts, expected):
    prefill, decode = pair
    batcher = decode.scheduler.batcher
    for i in range(6):
        begin(pair, i, prompts, 0, 100)
    until(pair, lambda: len(batcher.running) == 5 and min(req.num_output_tokens for req in batcher.running) > 2)
    for i in range(6, 10):
        begin(pair, i, prompts, 5, 100)
    until(pair, lambda: decode.scheduler.idle and prefill.scheduler.idle)
    outputs, failures = decode.take()
    assert not failures and tokens_of(outputs) == {str(i): expected[str(i)] for i in range(10)}
    order = [item.rid for item in outputs if item.finish is not None]
    assert batcher.retraction.num_preempted >= 3 and batcher.swap.num_swapped_out == batcher.retraction.num_retracted
    assert int(order[-1]) < 6 and int(order[-2]) < 6, "preempted requests end last"
    prefill.take()
    for side in pair:
        side.assert_clean()
    assert batcher.swap.num_pages == 0


def test_aborts_while_pages_are_in_host_memory(pair, prompts, expected):
    prefill, decode = pair
    batcher = decode.scheduler.batcher
    for i in range(5):
        begin(pair, i, prompts, 0, 300)
    until(pair, lambda: len(batcher.running) == 5)
    for i in range(6, 9):
        begin(pair, i, prompts, 5, 300)
    until(pair, lambda: sum(req.swapped_out is not None for req in batcher.waiting) >= 2)
    aborted = next(req for req in batcher.waiting if req.swapped_out is not None)
    decode.abort(aborted)
    until(pair, lambda: decode.scheduler.idle and prefill.scheduler.idle)
    outputs, failures = decode.take()
    tokens = tokens_of(outputs)
    assert list(failures) == [aborted.rid]
    for rid in map(str, [*range(5), 6, 7, 8]):
        assert rid == aborted.rid or tokens[rid] == expected[rid]
    prefill.take()
    for side in pair:
        side.assert_clean()
    assert batcher.swap.num_pages == 0
