"""Admission of requests that fit before one that does not: bounds, order, no starvation, equal decisions."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.api.errors import ConfigError
from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ScheduleArgs
from baton.common.config.server.schedule import SCHEDULE_POLICIES
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request.req import Req
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.page_budget import QueueAdmission

PAGE, POOL = 4, 40  # a pool of 160 tokens
EXAMPLES = settings(max_examples=60, deadline=None)


@dataclass
class Arrival:
    step: int
    prompt: int
    output: int
    priority: int = 0


@dataclass
class Waiter:
    """A request that waits, and the pages of equally urgent ones that came later and were admitted before it."""

    req: Req
    pages: int
    passed: int = 0


@dataclass
class Server:
    """A batcher with a clock that counts steps. ``incoming``: another server fills the pages of requests, which takes
    three steps, as on a decode server."""

    ratio: float
    policy: str = "fcfs"
    incoming: bool = False
    priorities: bool = False
    now: int = 0
    admitted: list[str] = field(default_factory=list)
    waiters: dict[str, Waiter] = field(default_factory=dict)
    worst: float = 0.0

    def __post_init__(self):
        args = ScheduleArgs(schedule_backfill_ratio=self.ratio, schedule_policy=self.policy, max_running_requests=64,
                            schedule_conservativeness=0.0, enable_priority_scheduling=self.priorities,
                            priority_scheduling_preemption_threshold=100 if self.priorities else 10)
        self.batcher = Batcher(KVCacheManager(POOL, PAGE, False), args)
        self.arrived = self.batcher.make_queue() if self.incoming else self.batcher.waiting
        self.admission = QueueAdmission(self.batcher.page_budget, self.incoming)
        self.transfers = {}
        self.numbers = itertools.count()

    def add(self, prompt, output, priority=0):
        number = next(self.numbers)
        message = Generate(str(number), [7] * prompt, SamplingParams(max_new_tokens=output), priority=priority,
                           slo_ttft=float(output))
        req = Req.from_message(message, eos_ids=frozenset(), now=float(number), timeout=1e9)
        self.waiters[req.rid] = Waiter(req, -(-prompt // PAGE))
        self.arrived.append(req)
        return req

    def step(self):
        self.now += 1
        batcher = self.batcher
        batcher.poll_loads(float(self.now))
        if self.incoming:
            while batcher.has_slot and not batcher.waiting and (req := self.arrived.admit(self.admission)) is not None:
                batcher.add_transferring(req)
                self.transfers[req] = self.now + 3
            for req in [req for req, due in self.transfers.items() if due <= self.now]:
                del self.transfers[req]
                req.num_computed_tokens = req.num_prompt_tokens
                batcher.start_decode(req)
                req.append_token(7)
        step = batcher.next_prefill()
        if step is None:
            if not batcher.allocate_running():
                batcher.retraction.retract_decode()
            step = batcher.next_decode()
        for req in (*batcher.prefilling, *batcher.running, *batcher.transferring):
            if req.rid in self.waiters:
                self._on_admitted(req)
        if step is not None:
            batcher.mark_launched(step)
            for req in step.sampled_reqs:
                req.append_pending(7)
        batcher.finish_all([req for req in batcher.running if req.finish is not None])
        assert batcher.cache.num_allocated + batcher.cache.num_available == POOL

    def _on_admitted(self, req):
        pages = self.waiters.pop(req.rid).pages
        self.admitted.append(req.rid)
        if req.num_retractions:
            return  # it was here before
        for waiter in self.waiters.values():
            if waiter.req.arrived < req.arrived and waiter.req.priority == req.priority:
                waiter.passed += pages
                self.worst = max(self.worst, waiter.passed / waiter.pages)

    def serve(self, arrivals, max_steps=20_000):
        waiting = sorted(arrivals, key=lambda arrival: arrival.step)
        while waiting or not self.batcher.idle or self.arrived or self.transfers:
            assert self.now < max_steps, "requests starve"
            while waiting and waiting[0].step <= self.now:
                first = waiting.pop(0)
                self.add(first.prompt, first.output, first.priority)
            self.step()
        self.batcher.cache.check_integrity()


arrivals = st.lists(st.builds(Arrival, st.integers(0, 60), st.one_of(st.integers(1, 12), st.integers(60, 120)),
                              st.integers(1, 24), st.sampled_from([0, 0, 5])), min_size=1, max_size=50)


@EXAMPLES
@given(arrivals, st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.booleans(), st.booleans())
def test_no_request_is_passed_by_more_than_the_bound(arriving, ratio, incoming, priorities):
    """Requests behind another take at most ``ratio`` times its pages before it; in the end all are served."""
    server = Server(ratio, incoming=incoming, priorities=priorities)
    server.serve([arrival if priorities else Arrival(arrival.step, arrival.prompt, arrival.output)
                  for arrival in arriving])
    assert server.worst <= ratio
    assert set(server.admitted) == {str(number) for number in range(len(arriving))}
    assert not server.waiters


@EXAMPLES
@given(arrivals, st.sampled_from(list(SCHEDULE_POLICIES.names)), st.booleans())
def test_equal_inputs_give_equal_decisions(arriving, policy, incoming):
    first, second = Server(2.0, policy, incoming), Server(2.0, policy, incoming)
    for server in (first, second):
        server.serve(arriving)
    assert first.admitted == second.admitted and first.now == second.now


@pytest.mark.parametrize("incoming", [False, True])
def test_small_requests_pass_a_large_one_and_do_not_starve_it(incoming):
    """A stream of small requests that never ends, of 2 pages each. The large one needs 30 of 40 pages."""
    def admitted_at(ratio):
        server = Server(ratio, incoming=incoming)
        large = None
        while large is None or large.rid in server.waiters:
            for output in (2, 3, 3):
                server.add(5, output)
            server.step()
            if server.now == 10:
                large = server.add(120, 4)
            elif server.now == 600:
                return None
        passed = [rid for rid in server.admitted[:server.admitted.index(large.rid)] if int(rid) > int(large.rid)]
        return len(passed), server.now

    strict, bounded, unbounded = (admitted_at(ratio) for ratio in (0.0, 1.0, 1e9))
    assert strict[0] == 0
    assert 0 < bounded[0] <= 15 and strict[1] <= bounded[1] < 100
    assert unbounded is None, "without a bound it starves"


def test_a_blocked_request_that_fits_again_comes_first():
    server = Server(4.0)
    holder = server.add(100, 30)
    server.step()
    for prompt in (80, 70, 8):  # the last fits, and passes two
        server.add(prompt, 20)
    server.step()
    assert server.admitted == ["0", "3"] and [req.rid for req in server.batcher.waiting] == ["1", "2"]
    server.batcher.finish(holder)
    server.step()
    assert server.admitted == ["0", "3", "1"]
    server.batcher.remove([server.batcher.waiting.peek()])  # the second is blocked; an abort removes it
    assert not server.batcher.waiting


def test_requests_set_aside_keep_their_order_under_another_policy():
    server = Server(4.0)
    server.add(120, 8)
    server.step()
    reqs = [server.add(120, output) for output in (5, 20, 10)]
    server.step()
    server.batcher.set_args(ScheduleArgs(schedule_policy="lof", schedule_backfill_ratio=4.0))
    order = []
    while (req := server.batcher.waiting.peek()) is not None:
        server.batcher.waiting.remove(req)
        order.append(req)
    assert order == [reqs[1], reqs[2], reqs[0]]


def test_a_retracted_request_is_not_passed():
    """Memory has just run out: what is free is left for it."""
    server = Server(1e9)
    first, second = server.add(60, 60), server.add(60, 60)
    while not server.batcher.retraction.num_retracted:
        server.step()
    assert second in server.batcher.waiting and first in server.batcher.running
    server.add(4, 1)
    server.step()
    assert len(server.batcher.waiting) == 2


def test_a_cached_prefix_counts_as_memory_that_is_taken():
    """Evictable pages that a request would lock are not free for others any more."""
    cache = KVCacheManager(POOL, PAGE)
    table = cache.match_prefix(tokens := np.arange(80, dtype=np.int32), 0)
    assert cache.allocate_slots(table, 80)
    cache.release(table, tokens)
    batcher = Batcher(cache, ScheduleArgs(schedule_conservativeness=0.0))
    req = Req.from_message(Generate("0", [*range(80), 1, 2, 3, 4], SamplingParams(max_new_tokens=4)),
                           eos_ids=frozenset(), now=0.0, timeout=1e9)
    before = cache.num_available
    assert batcher.admission.pages(req) == 21 and cache.num_available == before == batcher.page_budget.headroom
    assert batcher.admission.reserve(req) and before - cache.num_available == 21


def test_a_negative_ratio_is_refused():
    with pytest.raises(ConfigError, match="--schedule-backfill-ratio must be 0 or more, not -1"):
        ScheduleArgs(schedule_backfill_ratio=-1.0)
