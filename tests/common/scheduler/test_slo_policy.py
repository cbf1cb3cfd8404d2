"""The policy slo: least slack first, those that come too late last; goodput on a virtual clock."""

import itertools

import numpy as np
import pytest

from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ScheduleArgs
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request.req import Req
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.policies.order import OrderInputs
from baton.common.scheduler.policies.slo import LATE_TURN, LeastSlackFirst
from baton.common.scheduler.prefill_pace import PrefillPace
from baton.tests.helpers.simulated_server import SimulatedServer

_rids = itertools.count()


def make_req(tokens, slo=None, arrived=0.0):
    message = Generate(str(next(_rids)), list(tokens), SamplingParams(max_new_tokens=8), slo_ttft=slo)
    return Req.from_message(message, eos_ids=frozenset(), now=arrived, timeout=1e9)


def measured(seconds_per_token, now=0.0):
    pace = PrefillPace()
    pace.launch(1000)
    pace.begin(1000 * seconds_per_token)
    pace.begin(1000 * seconds_per_token)
    pace.now = now
    return pace


def drain(order):
    found = []
    while len(order):
        found.append(order.first())
        order.discard(found[-1])
    return found


def test_the_least_slack_comes_first():
    """Slack is what is left of the objective after computing the prompt."""
    order = LeastSlackFirst(OrderInputs(None, 0, measured(0.001), default_slo_ttft=5.0))
    long, urgent, short = make_req([1] * 2000, slo=4.0), make_req([1] * 100, slo=1.0), make_req([1] * 100, slo=3.0)
    default = make_req([1] * 10)
    for req in (default, short, long, urgent):
        order.add(req)
    assert drain(order) == [urgent, long, short, default]


def test_a_cached_prefix_needs_no_time():
    cache = KVCacheManager(64, 4)
    tokens = np.arange(80, dtype=np.int32)
    table = cache.match_prefix(tokens, 0)
    assert cache.allocate_slots(table, 80)
    cache.release(table, tokens)
    order = LeastSlackFirst(OrderInputs(cache.prefix_cache, 0, measured(0.01), page_size=4))
    cached, other = make_req([*range(80), 1], slo=2.0), make_req([7] * 81, slo=2.0)
    for req in (cached, other):
        order.add(req)
    assert drain(order) == [other, cached]


def test_what_comes_too_late_comes_last_and_does_not_starve():
    pace = measured(0.001, now=10.0)
    order = LeastSlackFirst(OrderInputs(None, 0, pace))
    late = [make_req([1] * 500, slo=2.0, arrived=arrived) for arrived in (8.1, 8.0)]
    in_time = [make_req([1] * 100, slo=60.0, arrived=10.0) for _ in range(2 * LATE_TURN)]
    for req in (*late, *in_time):
        order.add(req)
    found = drain(order)
    assert [found.index(req) for req in late] == [2 * LATE_TURN + 1, LATE_TURN], "due first, first"
    assert [req for req in found if req in in_time] == in_time


def test_the_pace_is_measured_over_the_steps_with_prompts():
    pace = PrefillPace()
    assert pace.seconds_per_token == pace.tokens_per_second == 0.0
    now = 100.0
    for _ in range(200):  # a prompt of 1,000 tokens takes 0.1 s, then a decode step, then nothing for a second
        pace.begin(now)
        pace.launch(1000)
        pace.begin(now)
        now += 0.1
        pace.begin(now)
        now += 1.0
    assert pace.tokens_per_second == pytest.approx(10_000, rel=0.01)
    for _ in range(200):  # later it takes twice as long
        pace.begin(now)
        pace.launch(1000)
        pace.begin(now)
        now += 0.2
        pace.begin(now)
        now += 1.0
    assert pace.tokens_per_second == pytest.approx(5_000, rel=0.2)


def test_batchers_order_by_the_policy():
    batcher = Batcher(KVCacheManager(64, 4), ScheduleArgs(schedule_policy="slo", default_slo_ttft_ms=1e3))
    first, second = make_req([1, 2], arrived=1.0), make_req([1, 2], slo=0.5, arrived=1.2)
    batcher.waiting.append(first)
    batcher.waiting.append(second)
    batcher.poll_loads(1.3)
    assert batcher.waiting.peek() is second


def goodput(policy, slo):
    """Share of the requests in time, at 1.3 times the rate that the server can compute, prompts of mixed lengths."""
    server = SimulatedServer(ScheduleArgs(schedule_policy=policy, default_slo_ttft_ms=slo))
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(8.0, 1.0, 400).clip(100, 30_000).astype(int)
    times = np.cumsum(rng.exponential(1e3 / 11.0, 400))
    server.at_times([(float(time), int(length), 16) for time, length in zip(times, lengths)])
    return np.mean([asked.ttft <= slo for asked in server.asked])


def test_goodput_under_overload():
    assert goodput("slo", 2000.0) > 1.2 * goodput("fcfs", 2000.0)
