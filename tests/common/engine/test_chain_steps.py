"""Chain steps that follow each other: the scheduler's side, over a device that runs them late."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ScheduleArgs
from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.common.forward.chain_rows import ChainLevels
from baton.common.kvcache.manager import KVCacheManager
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.chain_planner import ChainPlanner
from baton.common.scheduler.drafting import Drafting
from baton.common.scheduler.request_tracker import RequestTracker
from baton.common.speculative.draft_length import CostTable, DraftLength
from baton.tests.helpers.chain_device import VOCAB, ChainDevice, answer
from baton.tests.helpers.outputs import outputs_of

ROWS = (1, 64)
COSTS = {"free": CostTable(ROWS, (1.0, 1.0), (1.0, 1.0), (0.0, 0.0)),
         "dear": CostTable(ROWS, (1.0, 1.0), (9.0, 9.0), (9.0, 9.0)),
         "even": CostTable(ROWS, (1.0, 1.0), (1.0, 3.0), (0.1, 0.1))}


class Matcher:
    """Some drafts are forbidden."""

    def __init__(self, rng):
        self.rng = rng

    def advance(self, token=None):
        return True

    def allowed(self, drafts):
        return drafts.first(int(self.rng.integers(0, len(drafts) + 1)))

    def error_at_end(self):
        return None


class Engine:
    """A scheduler over a ChainDevice."""

    def __init__(self, seed=0, *, num_pages=400, page_size=4, levels=(3,), max_running=8, radix=True, chunk=1000,
                 costs=None, eager=0.3, overlap=True, mixed=False, shifted=True):
        self.rng = np.random.default_rng(seed)
        self.cache = KVCacheManager(num_pages, page_size, radix, lookahead=int(shifted))
        self.device = ChainDevice(num_pages, page_size, max_running, levels[-1], self.rng, eager, shifted)
        self.sent, self.prompts, self.asked, self.aborted = [], {}, {}, set()
        self.tracker = RequestTracker(self.sent.append, eos_ids=frozenset(), vocab_size=VOCAB,
                                      max_request_tokens=num_pages * page_size, max_requests=512, timeout=1e9)
        self.drafting = Drafting(None, self.cache, levels[-1], max_request_tokens=500)
        self.lengths = None
        if costs is not None:
            self.lengths = DraftLength(COSTS[costs], levels[-1])
            self.drafting.adapt(self.lengths)
        self.drafting.keeps_drafts = levels[0] == 0
        captured = ChainLevels(tuple(levels), (max_running,) * len(levels), num_pages)
        args = ScheduleArgs(chunked_prefill_size=chunk, max_running_requests=max_running,
                            schedule_conservativeness=0.0, enable_mixed_chunk=mixed)
        self.batcher = Batcher(self.cache, args, drafting=self.drafting,
                               chains=ChainPlanner(captured, self.cache, self.drafting, 500))
        self.scheduler = UnifiedScheduler(self.batcher, self.device, self.tracker, overlap=overlap)

    def start(self, prompt, max_new_tokens=20, stop=(), *, extras=False, matcher=False, hidden=False):
        params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, stop_token_ids=tuple(stop),
                                frequency_penalty=0.5 if extras else 0.0)
        rid = str(len(self.asked))
        self.prompts[rid], self.asked[rid] = prompt, answer(prompt, max_new_tokens, stop)
        req = self.tracker.accept(Generate(rid, list(prompt), params, return_hidden_states=hidden),
                                  float(len(self.asked)))
        if matcher:
            req.matcher = Matcher(self.rng)
        self.scheduler.add(req)
        return req

    def step(self):
        found = self.scheduler.step(0.0)
        self.tracker.flush()
        self.check()
        return found

    def check(self):
        """The counts that are kept step by step are those of the requests."""
        queues = self.batcher.queues
        kept, queues._remaining = queues.remaining, None
        assert kept == queues.remaining
        assert not self.drafting.keeps_drafts or not any(req.draft_gap for req in self.batcher.running)

    def abort(self, req):
        self.scheduler.synchronize()
        if req.rid in self.tracker.live:
            self.aborted.add(req.rid)
            self.tracker.drop(req)
            self.scheduler.abort(req, None)

    def finish(self):
        while self.step():
            pass
        assert self.scheduler.idle and not self.tracker.live
        self.cache.check_integrity()
        assert self.cache.num_allocated == 0
        found = dict.fromkeys(self.asked, ())
        for item in outputs_of(self.sent):
            found[item.rid] = (*found[item.rid], *item.token_ids)
        for rid, expected in self.asked.items():
            got = list(found[rid])
            assert got == (expected[:len(got)] if rid in self.aborted else expected), rid
        return outputs_of(self.sent)

    @property
    def num_following(self):
        return sum(step.chains is not None and bool((step.chains.sources >= 0).any()) for step in self.device.launched)


def random_prompt(rng, shared, engine):
    if engine.asked and rng.random() < 0.3:  # the next turn of a conversation
        rid = str(rng.integers(len(engine.asked)))
        if len(before := [*engine.prompts[rid], *engine.asked[rid]]) < 40:
            return [*before, int(rng.integers(VOCAB))]
    return [*shared[:int(rng.integers(0, len(shared)))], *rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist()]


def random_case(seed):
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 4, 8]))
    short = rng.random() < 0.4
    engine = Engine(seed, num_pages=(int(rng.integers(60, 120)) if short else 600) // page_size, page_size=page_size,
                    levels=[(3,), (1, 3), (2,), (1, 2, 5), (0, 3), (0, 1, 5)][rng.integers(6)],
                    max_running=int(rng.integers(2, 9)),
                    radix=bool(rng.random() < 0.8), chunk=int(rng.choice([7, 1000])), eager=float(rng.choice([0, 0.3])),
                    costs=[None, None, "free", "dear", "even"][rng.integers(5)], mixed=bool(rng.random() < 0.1),
                    shifted=bool(rng.random() < 0.6))
    shared = rng.integers(0, VOCAB, 20).tolist()
    with_extras = rng.random() < 0.4
    reqs = []
    for _ in range(int(rng.integers(10, 60))):
        action = rng.random()
        if action < 0.3 and len(reqs) < 16:
            reqs.append(engine.start(
                random_prompt(rng, shared, engine), int(rng.integers(1, 25)) if rng.random() < 0.9 else 0,
                rng.integers(0, VOCAB, int(rng.integers(0, 2))).tolist(),
                extras=with_extras and bool(rng.random() < 0.3), matcher=with_extras and bool(rng.random() < 0.2)))
        elif action < 0.33 and reqs:
            engine.abort(reqs[int(rng.integers(len(reqs)))])
        elif action < 0.36:
            engine.scheduler.synchronize()
            engine.batcher.pause("retract" if rng.random() < 0.5 else "in_place")
            engine.step()
            engine.batcher.paused = None
        elif action < 0.38 and engine.lengths is not None:
            engine.lengths.num_drafts = int(rng.integers(0, 2)) * engine.lengths.num_drafts or int(rng.integers(0, 3))
        else:
            engine.step()
    engine.finish()
    return engine


@pytest.mark.parametrize("first", range(0, 320, 20))
def test_text_is_that_of_plain_decode(first):
    num_following = num_retracted = num_void = 0
    for seed in range(first, first + 20):
        try:
            engine = random_case(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        num_following += engine.num_following
        num_retracted += engine.batcher.retraction.num_retracted
        num_void += engine.device.num_void
    assert num_following > 50 and num_retracted > 0 and num_void > 100


def run_together(count=6, max_new_tokens=60, **options):
    engine = Engine(**options)
    for number in range(count):
        engine.start([number, 3, 5], max_new_tokens)
    return engine, engine.finish()


def test_each_step_follows_the_one_before_while_the_batch_stays():
    engine, _ = run_together()
    steps = [step for step in engine.device.launched if not step.num_prefill]
    assert all(step.chains is not None for step in steps)
    assert sum((step.chains.sources >= 0).all() for step in steps) == len(steps) - 1


def test_requests_join_and_leave_steps_that_follow():
    engine = Engine(eager=0)
    first = [engine.start([number, 3, 5], 30 + 9 * number) for number in range(3)]
    for _ in range(6):
        engine.step()
    engine.start([7, 8], 40)
    engine.finish()
    chains = [step for step in engine.device.launched if step.chains is not None]
    sizes = [len(step) for step in chains]
    assert sizes[0] == 3 and max(sizes) == 4 and sizes[-1] == 1
    alone = [step for step in chains if (step.chains.sources < 0).all()]
    assert len(alone) == 2  # the first, and the one after the second prompt
    left = [step.chains.sources.tolist() for step in chains if step.chains.sources.tolist() != list(range(len(step)))
            and step.chains.sources[0] >= 0]
    assert left and all(len(sources) < 4 for sources in left)
    assert all(req.finish is not None for req in first)


def test_a_request_that_joins_with_drafts_does_not_stop_the_others():
    """As on a decode server, where its prompt was computed elsewhere."""
    engine = Engine(eager=0)
    prompt = [4, 4, 9]
    engine.start([1, 3, 5], 40)
    for _ in range(3):
        engine.step()
    other = Engine()
    req = other.start(prompt, 30)
    while req.drafts is None:
        other.step()
    other.scheduler.synchronize()
    joining = engine.tracker.accept(Generate("joins", prompt, req.sampling), 0.0)
    engine.asked["joins"] = answer(prompt, 30)
    batcher = engine.batcher
    assert batcher.page_budget.reserve(joining, 3, 3)
    pages = joining.page_table.ids
    for position, (token, following) in enumerate(zip(prompt, [*prompt[1:], engine.asked["joins"][0]])):
        engine.device.slots[engine.device._slot(pages, position)] = token
        engine.device.draft_slots[engine.device._slot(pages, position)] = (token, following)
    joining.num_computed_tokens = 3
    batcher.add_transferring(joining)
    batcher.start_decode(joining)
    engine.scheduler.report(joining, joining.append_token(engine.asked["joins"][0]), None)
    engine.step()
    step = engine.device.launched[-1]
    assert step.chains.sources.tolist() == [0, -1] and step.chains.tokens[1, 0] == engine.asked["joins"][0]
    engine.finish()


def test_a_request_with_extras_has_the_host_wait():
    engine = Engine(eager=0)
    engine.start([1, 2], 40)
    engine.start([3, 2], 20, extras=True, matcher=True)
    engine.finish()
    steps = [step for step in engine.device.launched if step.chains is not None]
    with_extras = [step for step in steps if step.extra_index]
    assert with_extras and all((step.chains.sources < 0).all() for step in with_extras)
    for step in with_extras:
        rows = step.chains.num_drafts + 1
        assert step.num_samples.tolist() == rows.tolist() and len(step.sampling) == step.num_tokens == rows.sum()
        assert step.known_tokens.tolist() == [token for row, count in zip(step.chains.tokens.tolist(), rows.tolist())
                                              for token in row[:count]]
    assert any((step.chains.sources >= 0).all() for step in steps)
    assert {len(step.columns.positions) for step in steps if not step.extra_index} == {0}


def test_other_steps_take_requests_that_want_hidden_states_and_large_batches():
    engine = Engine()
    engine.start([1, 2], 20, hidden=True)
    engine.finish()
    assert all(step.chains is None for step in engine.device.launched)
    engine = Engine(max_running=6)
    engine.batcher.chains._levels = ChainLevels((3,), (4,), 400)
    for number in range(6):
        engine.start([number, 2], 10 + 10 * number)
    engine.finish()
    kinds = [(len(step) <= 4, step.chains is not None) for step in engine.device.launched if not step.num_prefill]
    assert set(kinds) == {(True, True), (False, False)}


@pytest.mark.parametrize("options", [{}, {"levels": (1, 3), "page_size": 1}, {"costs": "free"}], ids=str)
def test_reports_are_those_of_steps_in_turn(options):
    """Steps that run beyond the end of a request are not counted."""
    reports = []
    for overlap in (True, False):
        engine, outputs = run_together(overlap=overlap, **options)
        found = {item.rid: item.speculation for item in outputs if item.finish is not None}
        counters = engine.scheduler.counters
        assert counters["spec_draft_tokens"] == sum(report.num_drafts for report in found.values()) > 100
        assert counters["spec_accepted_tokens"] >= sum(report.num_accepted for report in found.values()) > 50
        reports.append((found, counters, engine.scheduler.gauges["spec_accept_length"] > 1))
    assert reports[0] == reports[1]


def test_dear_drafts_give_way_to_plain_steps_that_overlap():
    engine, _ = run_together(costs="dear", eager=0, max_new_tokens=300, num_pages=600)
    plain = [step for step in engine.device.launched if step.chains is None and not step.num_prefill]
    assert len(plain) > 50
    assert sum(step.tokens.known is None for step in plain) > 50


def test_steps_without_drafts_follow_each_other_and_keep_what_the_drafter_needs():
    engine = Engine(levels=(0, 3), costs="dear", eager=0, num_pages=600)
    for number in range(6):
        engine.start([number, 3, 5], 300)
    for _ in range(150):
        engine.step()
    steps = [step for step in engine.device.launched if not step.num_prefill]
    assert all(step.chains is not None for step in steps)
    assert [step.chains.width for step in steps[-50:]] == [1] * 50
    assert all((step.chains.sources >= 0).all() for step in steps[-50:])
    drafted = engine.drafting.num_drafted
    engine.drafting.adapt(DraftLength(COSTS["free"], 3))
    engine.finish()  # the device checks all that a draft reads
    assert engine.device.launched[-1].chains.width == 4 and engine.drafting.num_drafted > drafted + 100


@pytest.mark.parametrize("count", range(1, 9))
def test_a_page_that_ends_with_an_answer_is_right_in_the_next_turn(count):
    engine = Engine(eager=0, page_size=4, shifted=False)
    engine.start([1, 3, 5, 9], 4 * count)
    while engine.step():
        pass
    turn = [1, 3, 5, 9, *engine.asked["0"]]
    engine.start([*turn, 2, 6], 8)
    engine.finish()
    assert len(turn) % 4 == 0


def test_a_batch_of_another_size_may_change_the_level():
    engine, _ = run_together(levels=(1, 2, 5), costs="even", eager=0)
    widths = {step.chains.width for step in engine.device.launched if step.chains is not None}
    assert len(widths) > 1


def test_where_pages_are_short_rows_are_void_and_nobody_is_retracted_for_them():
    num_void = []
    for num_pages in (400, 12):
        engine = Engine(num_pages=num_pages, page_size=4, radix=False)
        for number in range(2):
            engine.start([number, 3, 5, 7], 20)
        engine.finish()
        assert engine.batcher.retraction.num_retracted == 0
        num_void.append(engine.device.num_void)
    assert num_void[1] > num_void[0]
