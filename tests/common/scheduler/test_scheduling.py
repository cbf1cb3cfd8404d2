"""Parts of the batcher: orders, budgets, the new-token ratio, priorities."""

import itertools
import random
import time

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.config.cli import parse
from baton.common.config.server import ScheduleArgs, ServerConfig
from baton.common.config.server.schedule import SCHEDULE_POLICIES
from baton.common.kvcache.cache_group import CacheGroup, SlidingWindow
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request.req import Req, SwappedOut
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.new_token_ratio import NewTokenRatio, remaining_decrease, remaining_output
from baton.common.scheduler.page_budget import PageBudget
from baton.common.scheduler.policies.order import (
    SORT_WINDOW_REQUESTS,
    SORTED_PER_PEEK,
    KeyOrder,
    OrderInputs,
    SortedOrder,
)
from baton.common.scheduler.policies.priority import Priorities
from baton.common.scheduler.prefill_budget import LOGPROB_CHUNK_TOKENS, PrefillBudget
from baton.common.scheduler.request_queues import RequestQueues
from baton.common.scheduler.waiting_queue import WaitingQueue

PAGE = 4
_arrivals = itertools.count()


def make_req(prompt, *, max_new=8, priority=None, logprobs=False, rid=None):
    count = next(_arrivals)
    message = Generate(rid or str(count), list(prompt), SamplingParams(max_new_tokens=max_new), priority=priority,
                       return_logprob=logprobs, logprob_start_len=0 if logprobs else -1)
    return Req.from_message(message, eos_ids=frozenset(), now=float(count), timeout=1e9)


def remember(cache, prompt):
    """Leave a prompt's pages in the prefix cache."""
    tokens = np.array(prompt, np.int32)
    table = cache.match_prefix(tokens, 0)
    assert cache.allocate_slots(table, len(tokens))
    cache.release(table, tokens)


def preempts(batcher, req, num_tokens, prefix_limit):
    return batcher.retraction.should_preempt_for(req, num_tokens, prefix_limit, has_slot=batcher.has_slot)


def drain(queue):
    actual = []
    while (req := queue.peek()) is not None:
        queue.remove(req)
        actual.append(req)
    return actual


def queue_of(name, cache=None, seed=0, urgency=lambda req: 0):
    return WaitingQueue(SCHEDULE_POLICIES.get(name)(OrderInputs(cache.prefix_cache if cache else None, seed)), urgency)


# ---------------------------------------------------------------- orders


def test_fcfs_and_longest_output_first():
    reqs = [make_req([1], max_new=n) for n in (3, 9, 9, 1)]
    for name, order in (("fcfs", [0, 1, 2, 3]), ("lof", [1, 2, 0, 3])):
        queue = queue_of(name)
        for req in reqs:
            queue.append(req)
        assert drain(queue) == [reqs[i] for i in order]
        assert not queue


def test_random_is_equal_on_every_rank():
    reqs = [make_req([1]) for _ in range(40)]
    orders = []
    for seed in (5, 5, 6):
        queue = queue_of("random", seed=seed)
        for req in reqs:
            queue.append(req)
        orders.append(drain(queue))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != reqs and sorted(map(id, orders[0])) == sorted(map(id, reqs))


def test_longest_prefix_first_follows_the_cache():
    cache = KVCacheManager(64, PAGE)
    remember(cache, range(8))
    remember(cache, range(20, 32))
    none, short, long = make_req(range(50, 60)), make_req([*range(8), 1]), make_req([*range(20, 32), 1])
    queue = queue_of("lpm", cache)
    for req in (none, short, long):
        queue.append(req)
    assert queue.peek() is long
    remember(cache, range(50, 60))  # 8 tokens of it: equal to ``short``, and it came first
    queue.remove(long)
    assert drain(queue) == [none, short]


def test_subtrees_with_the_most_waiting_requests_come_first_and_stay_together():
    cache = KVCacheManager(64, PAGE)
    light, heavy = list(range(8)), list(range(20, 28))
    for stem in (light, heavy):
        remember(cache, stem)
        remember(cache, [*stem, 90, 91, 92, 93])
    one = make_req([*light, 1])
    deep = [make_req([*heavy, 90, 91, 92, 93, i]) for i in range(2)]
    stem = make_req([*heavy, 2])
    other = make_req([70] * 9)
    queue = queue_of("dfs-weight", cache)
    for req in (one, deep[0], other, stem, deep[1]):
        queue.append(req)
    assert drain(queue) == [*deep, stem, one, other]


def test_the_current_subtree_is_not_left_for_one_of_equal_weight():
    cache = KVCacheManager(64, PAGE)
    early, heavy = list(range(8)), list(range(20, 28))
    for prompt in (early, heavy):
        remember(cache, prompt)
    others = [make_req([*early, i]) for i in range(2)]
    begun = [make_req([*heavy, i]) for i in range(3)]
    queue = queue_of("dfs-weight", cache)
    for req in (*others, *begun):
        queue.append(req)
    actual = []
    for seen in range(5):
        actual.append(queue.peek())
        queue.remove(actual[-1])
        remember(cache, [60 + seen] * 8)  # the tree changes, so the next look arranges anew
    assert actual == [begun[0], begun[1], *others, begun[2]]


@pytest.mark.parametrize("name", [name for name in SCHEDULE_POLICIES if SCHEDULE_POLICIES.has(name, "prefix_cache")])
def test_without_a_prefix_cache_requests_keep_their_order(name):
    queue, reqs = queue_of(name), [make_req([i]) for i in (3, 1, 2)]
    for req in reqs:
        queue.append(req)
    assert drain(queue) == reqs


@pytest.mark.parametrize("name", SCHEDULE_POLICIES.names)
def test_requests_leave_a_queue_in_any_order(name):
    cache = KVCacheManager(64, PAGE)
    rng = random.Random(3)
    queue = queue_of(name, cache, urgency=lambda req: req.num_prompt_tokens % 3)
    inside = []
    for step in range(600):
        if rng.random() < 0.55 or not inside:
            req = make_req([1] * rng.randrange(1, 20), max_new=rng.randrange(1, 9))
            (queue.append if rng.random() < 0.8 else queue.requeue)(req)
            inside.append(req)
        elif rng.random() < 0.5:
            queue.remove(inside.pop(rng.randrange(len(inside))))
        else:
            head = queue.peek()
            assert head.num_prompt_tokens % 3 == max(req.num_prompt_tokens % 3 for req in inside)
            queue.remove(head)
            inside.remove(head)
        assert len(queue) == len(inside) and list(queue) == inside
        if step == 300:
            queue.reorder(SCHEDULE_POLICIES.get("lof")(OrderInputs(None, 0)))
    assert set(drain(queue)) == set(inside)


def test_requeued_requests_come_first_the_newest_before_the_others():
    queue = queue_of("lof")
    reqs = [make_req([1], max_new=n) for n in (9, 1, 2)]
    queue.append(reqs[0])
    queue.requeue(reqs[1])
    queue.requeue(reqs[2])
    assert drain(queue) == [reqs[2], reqs[1], reqs[0]]


def test_sorting_looks_at_a_bounded_number():
    looked = []
    version = itertools.count()
    order = SortedOrder(lambda reqs: looked.append(len(reqs)) or list(reqs), lambda: next(version))
    for _ in range(1000):
        order.add(make_req([1]))
    for _ in range(160):
        order.discard(order.first())
    assert max(looked) == SORT_WINDOW_REQUESTS and sum(looked) <= 161 * SORTED_PER_PEEK + SORT_WINDOW_REQUESTS


def test_a_heap_drops_stale_entries():
    order = KeyOrder(lambda req: 0.0)
    first = make_req([1])
    order.add(first)
    for _ in range(500):
        order.add(req := make_req([1]))
        order.discard(req)
    assert order.first() is first and len(order._heap) < 40


@pytest.mark.parametrize("name", SCHEDULE_POLICIES.names)
def test_a_step_costs_the_same_however_many_wait(name):
    """Steps that admit no request, and steps that admit one and end one: with 8,000 waiting as with 200."""
    def seconds(count):
        cache = KVCacheManager(4096, PAGE)
        batcher = Batcher(cache, ScheduleArgs(schedule_policy=name, max_running_requests=8, chunked_prefill_size=64))
        rng = np.random.default_rng(0)
        stems = [rng.integers(0, 9, 12).tolist() for _ in range(16)]
        for i in range(count):
            batcher.waiting.append(make_req([*stems[i % 16], i % 90, i // 90], max_new=1 + i % 7))
        best = float("inf")
        for _ in range(5):
            began = time.process_time()
            for _ in range(20):
                batch = batcher.next_prefill()
                if batch is not None:
                    batcher.mark_launched(batch)
                for req in batcher.running[:1]:
                    req.num_pending = 0
                    batcher.finish(req)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(8000) < 3 * seconds(200) + 0.01


# ---------------------------------------------------------------- budgets


def distributed(args, lengths, **options):
    budget = PrefillBudget(args, **options)
    return [budget.take(make_req([1] * n)) for n in lengths]


def test_a_step_of_prompts_stays_within_its_budgets():
    assert distributed(ScheduleArgs(chunked_prefill_size=100), [30, 50, 40, 9]) == [30, 50, 20, 0]
    assert distributed(ScheduleArgs(chunked_prefill_size=100, max_prefill_tokens=60), [30, 50, 40]) == [30, 30, 0]
    # the first prompt is bound by the chunk alone
    assert distributed(ScheduleArgs(chunked_prefill_size=100, max_prefill_tokens=60), [90, 5]) == [90, 0]
    assert distributed(ScheduleArgs(chunked_prefill_size=100), [30, 50, 40], max_batch_tokens=40) == [30, 10, 0]
    assert distributed(ScheduleArgs(chunked_prefill_size=100), [90, 5], max_batch_tokens=40) == [90, 0]
    unchunked = ScheduleArgs(chunked_prefill_size=-1, max_prefill_tokens=60)
    assert distributed(unchunked, [500, 5]) == [500, 0]
    assert distributed(unchunked, [30, 31, 5]) == [30, 0, 0]
    assert distributed(unchunked, [30, 20, 10]) == [30, 20, 10]
    assert distributed(ScheduleArgs(chunked_prefill_size=8), [30, 4], num_decode_rows=3) == [5, 0]
    assert distributed(ScheduleArgs(chunked_prefill_size=8), [30], num_decode_rows=30) == [1]
    assert distributed(ScheduleArgs(prefill_max_requests=2), [3, 5, 4]) == [3, 5, 0]


@pytest.mark.parametrize("chunk", [8192, -1])
def test_prompt_logprobs_bind_the_step(chunk):
    budget = PrefillBudget(ScheduleArgs(chunked_prefill_size=chunk))
    assert budget.take(make_req([1] * 10)) == 10
    wants = make_req([1] * 2000, logprobs=True)
    assert budget.take(wants) == LOGPROB_CHUNK_TOKENS
    assert budget.exhausted


# ---------------------------------------------------------------- the new-token ratio


def test_the_ratio_decays_and_jumps():
    ratio = NewTokenRatio(1.0)
    assert ratio.reserved_tokens(1000) == 700
    for _ in range(1000):
        ratio.decay()
    assert ratio.reserved_tokens(1000) == 98
    req = make_req([1], max_new=100)
    for token in range(60):
        req.append_token(token)
    ratio.on_retraction([req])
    assert ratio.ratio == pytest.approx(80 / 101)
    ratio.on_retraction([make_req([1], max_new=100)])
    assert ratio.ratio == pytest.approx(80 / 101), "a retraction never lowers it"
    assert NewTokenRatio(9.0).ratio == 1.0
    none = NewTokenRatio(0.0)
    none.on_retraction([req])
    assert none.reserved_tokens(10_000) == 0


@pytest.mark.parametrize("conservativeness, admitted", [(0.0, 8), (1.0, 5), (2.0, 4)])
def test_pages_are_reserved_for_output(conservativeness, admitted):
    """Prompts of 8 tokens with 24 of output, in 128 tokens: 16 fit by their prompts, 4 with all of their output."""
    cache = KVCacheManager(32, PAGE, prefix_cache=False)
    batcher = Batcher(cache, ScheduleArgs(schedule_conservativeness=conservativeness, max_running_requests=64))
    for _ in range(8):
        batcher.waiting.append(make_req(range(8), max_new=24))
    batcher.next_prefill()
    assert len(batcher.prefilling) == admitted
    prefill = Batcher(KVCacheManager(32, PAGE), ScheduleArgs(), decodes=False)
    for _ in range(8):
        prefill.waiting.append(make_req(range(8), max_new=2400))
    prefill.next_prefill()
    assert len(prefill.prefilling) == 8, "a prefill server makes no output"


def test_one_request_alone_needs_no_more_than_itself():
    cache = KVCacheManager(8, PAGE)
    batcher = Batcher(cache, ScheduleArgs(schedule_conservativeness=5.0))
    batcher.waiting.append(make_req(range(30), max_new=2))
    assert batcher.next_prefill() is not None


# ---------------------------------------------------------------- priorities


def admitted_of(batcher):
    return [req.rid for req in batcher.prefilling]


@pytest.mark.parametrize("low_first", [False, True])
def test_urgent_requests_come_first(low_first):
    args = ScheduleArgs(enable_priority_scheduling=True, schedule_low_priority_values_first=low_first,
                        default_priority_value=5)
    batcher = Batcher(KVCacheManager(64, PAGE), args)
    for rid, priority in (("low", 1), ("default", None), ("high", 9), ("five", 5)):
        batcher.waiting.append(make_req([1, 2], priority=priority, rid=rid))
    batcher.next_prefill()
    order = ["high", "default", "five", "low"]
    assert admitted_of(batcher) == (["low", "default", "five", "high"] if low_first else order)


def test_priorities_count_only_where_they_are_enabled():
    batcher = Batcher(KVCacheManager(64, PAGE), ScheduleArgs())
    for rid, priority in (("a", 1), ("b", 9)):
        batcher.waiting.append(make_req([1, 2], priority=priority, rid=rid))
    batcher.next_prefill()
    assert admitted_of(batcher) == ["a", "b"]
    assert not preempts(batcher, make_req([1] * 500, priority=99), 500, 499)


def test_an_urgent_prompt_is_computed_before_one_that_has_begun():
    args = ScheduleArgs(enable_priority_scheduling=True, chunked_prefill_size=8)
    batcher = Batcher(KVCacheManager(64, PAGE), args)
    batcher.waiting.append(make_req(range(40), rid="slow"))
    batcher.mark_launched(batcher.next_prefill())
    batcher.waiting.append(make_req(range(50, 56), priority=1, rid="urgent"))
    batch = batcher.next_prefill()
    assert [(chunk.req.rid, chunk.stop - chunk.start) for chunk in batch.chunks] == [("urgent", 6), ("slow", 2)]


def test_only_requests_less_urgent_by_more_than_the_threshold_are_preempted():
    args = ScheduleArgs(enable_priority_scheduling=True, max_running_requests=2,
                        priority_scheduling_preemption_threshold=3)
    batcher = Batcher(KVCacheManager(64, PAGE), args)
    for rid, priority in (("one", 1), ("two", 2)):
        batcher.waiting.append(make_req([1, 2], priority=priority, rid=rid))
    batcher.mark_launched(batcher.next_prefill())
    for req in batcher.running:
        req.append_pending(7)
    assert not preempts(batcher, make_req([5], priority=4), 1, 0), "no request is less urgent by more than 3"
    urgent = make_req([5], priority=5)
    assert preempts(batcher, urgent, 1, 0)
    batcher.preempt_for(urgent, 1, 0)
    assert [req.rid for req in batcher.running] == ["two"] and [req.rid for req in batcher.waiting] == ["one"]
    assert not preempts(batcher, urgent, 1, 0)


def test_no_request_is_preempted_where_that_would_not_help():
    args = ScheduleArgs(enable_priority_scheduling=True, priority_scheduling_preemption_threshold=0)
    batcher = Batcher(KVCacheManager(8, PAGE, prefix_cache=False), args)
    for rid, priority in (("urgent", 9), ("low", 0)):
        batcher.waiting.append(make_req([1] * 8, priority=priority, rid=rid, max_new=1))
    batcher.mark_launched(batcher.next_prefill())
    assert len(batcher.running) == 2
    assert not preempts(batcher, make_req([1] * 28, priority=5), 28, 27), "the more urgent one keeps what it would need"


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("wrong", [
    {"chunked_prefill_size": 0}, {"chunked_prefill_size": -2}, {"max_prefill_tokens": 0}, {"max_running_requests": 0},
    {"schedule_conservativeness": -0.1}, {"schedule_conservativeness": float("nan")}, {"retract_host_memory_gb": -1},
    {"schedule_low_priority_values_first": True}, {"default_priority_value": 3},
    {"priority_scheduling_preemption_threshold": 4},
    {"priority_scheduling_preemption_threshold": -1, "enable_priority_scheduling": True}],
    ids=lambda wrong: ",".join(f"{k}={v}" for k, v in wrong.items()))
def test_arguments_that_cannot_be_are_refused_with_a_sentence(wrong):
    with pytest.raises(ConfigError, match=r"^--[a-z-]+ (must|needs) .*\.$"):
        ScheduleArgs(**wrong)


@pytest.mark.parametrize("flags, sentence", [
    (["--disaggregation-mode", "prefill", "--enable-mixed-chunk"], "--enable-mixed-chunk is for servers that decode"),
    (["--is-embedding", "--retract-host-memory-gb", "1"], "--retract-host-memory-gb is for servers that decode"),
    (["--schedule-policy", "dfs-weight", "--disable-radix-cache"], "needs the prefix cache")])
def test_flags_that_do_not_fit_the_server_are_refused(flags, sentence, capsys):
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--model-path", "m", *flags], prog="x", description="")
    assert sentence in capsys.readouterr().err


def test_a_step_is_sized_by_the_longest_prompt_where_prompts_are_whole():
    assert ScheduleArgs(chunked_prefill_size=100).largest_prefill(4096) == 100
    assert ScheduleArgs(chunked_prefill_size=-1).largest_prefill(4096) == 16384
    assert ScheduleArgs(chunked_prefill_size=-1, max_prefill_tokens=512).largest_prefill(4096) == 4096


# ---------------------------------------------------------------- pages


def test_clipped_remainders_shrink_only_below_the_clip():
    assert remaining_decrease(np.array([1, 4096, 4097])) == 2
    assert remaining_decrease(np.array([3, 4096, 4098, 5000]), np.array([3, 2, 4, 9])) == 3 + 2 + 2 + 0
    long = make_req([1], max_new=5000)
    assert remaining_output(long) == 4096
    assert remaining_output(make_req([1], max_new=8)) == 8


def test_a_ratio_of_zero_reserves_nothing_after_a_retraction_either():
    ratio = NewTokenRatio(0.0)
    ratio.on_retraction([make_req([1])])
    assert ratio.reserved_tokens(1000) == 0


def test_a_retraction_raises_the_ratio_to_what_was_used():
    ratio = NewTokenRatio(1.0)
    ratio.decay()
    assert ratio.ratio == pytest.approx(0.699)
    ratio.on_retraction([make_req([1], max_new=19)])
    assert ratio.ratio == 1.0


def test_the_page_budget_reserves_and_names_what_is_short():
    cache = KVCacheManager(8, PAGE)
    budget = PageBudget(cache, NewTokenRatio(1.0), RequestQueues(queue_of("fcfs")), Priorities.of(ScheduleArgs()))
    remember(cache, range(8))
    req, embedded, large = make_req([*range(8), 1, 2, 3]), make_req(range(8)), make_req(range(100, 140))
    embedded.embeds = np.zeros((8, 2), np.float32)
    assert budget.shortfalls(req, 12, 8) == [3 - 2 - 6]
    assert budget.shortfalls(embedded, 8, 8) == [2 - 8]  # Its token ids do not identify its pages.
    assert not budget.reserve(large, 40, 36) and large.page_table is None
    assert budget.reserve(embedded, 8, 8) and embedded.page_table.num_cached_pages == 0
    assert budget.reserve(req, 12, 8) and req.page_table.num_cached_pages == 2
    assert budget.allocate_next(req) and req.page_table.count == 3
    req.num_computed_tokens = 8
    budget.release([req, embedded, large], keep=True)
    assert req.page_table is None and req.num_computed_tokens == 0
    assert (cache.num_allocated, cache.num_cached) == (0, 2)


def test_pages_that_may_hold_nan_are_zeroed_and_not_cached():
    """Those of a request whose logits were not finite; what it shares with others stays."""
    group = CacheGroup(SlidingWindow(5), 9, PAGE)
    cache = KVCacheManager(100, PAGE, groups=[group])
    budget = PageBudget(cache, NewTokenRatio(0.0), RequestQueues(queue_of("fcfs")), Priorities.of(ScheduleArgs()))
    zeroed = []
    remember(cache, range(8))
    for scrubs in (False, True):
        cache.zero_pages = (lambda index, ids: zeroed.append((index, ids.tolist()))) if scrubs else None
        req = make_req([*range(8), *range(50, 62)])
        assert budget.reserve(req, 20, 20)
        req.num_computed_tokens, req.keeps_pages = 20, False
        own = req.page_table.ids[2:].tolist(), req.page_table.groups[0].ids[-1:].tolist()
        budget.release([req], keep=True)
        assert (cache.num_allocated, cache.num_cached) == (0, 2)
    assert [index for index, _ in zeroed] == [0, 1]
    assert zeroed[0][1] == own[0] and set(own[1]) <= set(zeroed[1][1])


def test_the_page_budget_reserves_pages_of_further_groups():
    """Bounded pages for each request, whatever its length; those of an incoming prompt, or of swapped tokens, at
    once."""
    group = CacheGroup(SlidingWindow(5), 9, PAGE)
    cache = KVCacheManager(100, PAGE, groups=[group])
    budget = PageBudget(cache, NewTokenRatio(0.0), RequestQueues(queue_of("fcfs")), Priorities.of(ScheduleArgs()))
    computed, incoming, swapped = (make_req(range(begin, begin + 20)) for begin in (0, 100, 200))
    swapped.swapped_out = SwappedOut([], 18)
    assert budget.reserve(computed, 20, 19) and not len(computed.page_table.groups[0].ids)
    assert budget.reserve(incoming, 20, 20) and len(incoming.page_table.groups[0].ids) == 1
    assert budget.reserve(swapped, 20, 19) and len(swapped.page_table.groups[0].ids) == 2
    assert [req.page_table.groups[0].bound for req in (computed, incoming, swapped)] == [3, 3, 3]
    another = make_req(range(300, 320))
    another.embeds = np.zeros((20, 2), np.float32)
    assert budget.shortfalls(another, 20, 0) == [5 - 85, 3] and not budget.reserve(another, 20, 0)
    budget.release([incoming], keep=True)
    assert budget.shortfalls(another, 20, 20) == [5 - 90, 0] and budget.reserve(another, 20, 20)
    assert another.page_table.groups[0].first == 4
    budget.release([swapped], keep=False)
    group.allocator.allocate(group.num_free)
    assert not budget.reserve(swapped, 20, 19) and swapped.page_table is None
