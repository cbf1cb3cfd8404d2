"""Prefetches from a storage into host memory: equal tokens by every policy, whatever the storage does."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.common.config.server.tiers import PrefetchLimits
from baton.common.distributed.tp import TPGroup
from baton.common.scheduler.tier_prefetch import Prefetches
from baton.tests.common.scheduler.test_tier_loads import checkpoint, expected, some_prompts  # noqa: F401 (fixtures)
from baton.tests.helpers.fake_storage import FakeStorage
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.tiers import in_host

PAGE_BYTES = 3 * 2 * 2 * 4 * 16 * 4
"""Layers, keys and values, heads, tokens, elements and their bytes of a page."""


def stored_engine(folder, policy="wait_complete", pages=4000, group=None, options=None, load_policy="always", **faults):
    """An engine over a FakeStorage. ``group``: TPGroup of its ranks; ``options`` of Engine."""
    tiers = in_host((pages + 0.5) * PAGE_BYTES / 1e9, hicache_load_policy=load_policy)
    engine = Engine(folder, **{"max_total_tokens": 160, "page_size": 4, "tiers": tiers} | (options or {}))
    host, batcher = engine.cache.tier, engine.scheduler.batcher
    assert host.page_bytes * (1 if group is None else group.size) == PAGE_BYTES
    engine.storage = FakeStorage(host, **faults)
    batcher.loads.prefetches = engine.prefetches = Prefetches(
        engine.cache, host, engine.storage, group or TPGroup(), batcher.rates, policy, PrefetchLimits(4, 0.5, 0.0))
    return engine


def run(engine, seconds=0.01):
    """Steps of ``seconds`` each, by the clock of the ticks, until all requests have ended."""
    now = 0.0
    while not engine.scheduler.idle:
        engine.scheduler.step(now)
        engine.storage.step()
        engine.tracker.flush()
        now += seconds
    engine.scheduler.batcher.loads.check_integrity()
    return engine.run()


def ask(engine, prompts, **options):
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt)
    return run(engine, **options)


def fill_storage(engine):
    """All prompts' pages are in the storage, and in no cache; returns the answers."""
    outputs = ask(engine, some_prompts())
    engine.cache._evict(engine.cache.num_cached)
    engine.cache.tier.flush()
    engine.cache.tier.poll()
    objects = dict(engine.storage.objects)
    engine.cache.flush()
    engine.storage.objects.update(objects)
    assert engine.cache.tier.num_pages == 0 and len(objects) >= sum((len(p) - 1) // 4 for p in some_prompts())
    return outputs


@pytest.mark.parametrize("faults", [
    {}, {"max_delay": 5}, {"fail_share": 0.5}, {"max_delay": 3, "fail_share": 0.3, "pages_a_step": 2}], ids=str)
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_tokens_are_equal_by_every_policy(checkpoint, expected, policy, faults):  # noqa: F811
    engine = stored_engine(checkpoint, policy, **faults)
    fill_storage(engine)
    outputs = ask(engine, some_prompts())
    assert tokens_of(outputs) == expected
    loads, prefetches = engine.scheduler.batcher.loads, engine.prefetches
    assert loads.num_loaded_stored > 0 and prefetches.num_held == 0
    if policy == "wait_complete" and not faults.get("fail_share"):
        assert {item.rid: item.num_cached_tokens for item in outputs} == {
            str(i): (len(prompt) - 1) // 4 * 4 for i, prompt in enumerate(some_prompts())}


def test_a_timeout_ends_the_wait(checkpoint, expected):  # noqa: F811
    engine = stored_engine(checkpoint, "timeout", max_delay=10**6)
    fill_storage(engine)
    engine.start("0", some_prompts()[0])
    for step in range(51):
        assert engine.scheduler.batcher.queues.prefetching
        engine.scheduler.step(0.01 * step)
    assert not engine.scheduler.batcher.queues.prefetching
    assert tokens_of(run(engine)) == {"0": expected["0"]}


def test_a_request_that_waits_for_the_storage_delays_no_other(checkpoint, expected):  # noqa: F811
    engine = stored_engine(checkpoint, max_delay=0)
    fill_storage(engine)
    engine.storage.max_delay = 10**6
    engine.start("0", some_prompts()[0])
    engine.start("other", [5, 6, 7])
    engine.scheduler.step(0.0)
    assert [req.rid for req in engine.scheduler.batcher.queues.prefetching] == ["0"]
    assert [req.rid for req in engine.scheduler.batcher.running] == ["other"]
    assert tokens_of(run(engine, seconds=1.0))["0"] == expected["0"]


@pytest.mark.parametrize("moment", ["querying", "reading", "read"])
def test_requests_that_leave_give_their_slots_back(checkpoint, expected, moment):  # noqa: F811
    """Not before the storage has stopped to write into them."""
    engine = stored_engine(checkpoint, pages_a_step=1)
    fill_storage(engine)
    batcher, host = engine.scheduler.batcher, engine.cache.tier
    req = engine.start("0", some_prompts()[0])
    engine.storage.max_delay = 10**6 if moment == "querying" else 0
    for _ in range({"querying": 1, "reading": 2, "read": 100}[moment]):
        batcher.poll_loads(0.0)
        if moment == "read":
            engine.storage.step()
    held = engine.prefetches.num_held
    assert held > 0 or moment == "querying"
    engine.scheduler.abort(req, None)
    engine.tracker.drop(req)
    assert not batcher.queues.prefetching
    if moment == "reading":
        assert len(batcher.loads) == 1 and engine.prefetches.num_held == held
    run(engine)
    assert engine.prefetches.num_held == 0 and host.reserve(host.capacity) is not None


def test_a_flush_forgets_prefetches(checkpoint, expected):  # noqa: F811
    engine = stored_engine(checkpoint, pages_a_step=1)
    fill_storage(engine)
    engine.start("0", some_prompts()[0])
    engine.scheduler.batcher.poll_loads(0.0)
    assert engine.prefetches.num_held > 0
    engine.cache.flush()
    assert tokens_of(run(engine)) == {"0": expected["0"]}
    assert engine.prefetches.num_held == 0


@pytest.mark.parametrize("load_policy", ["cheaper", "always"])
def test_slow_storage_is_not_read(checkpoint, expected, load_policy):  # noqa: F811
    engine = stored_engine(checkpoint, load_policy=load_policy)
    fill_storage(engine)
    batcher = engine.scheduler.batcher
    batcher.rates.prefill_rate.tokens_per_second, engine.storage.read_rate = 1e6, 1e3
    batcher.rates.prefill_rate.end = lambda: None
    before = engine.storage.num_reads
    outputs = ask(engine, some_prompts())
    assert tokens_of(outputs) == expected
    num_refused, num_read = engine.prefetches.counters["prefetches_refused"], engine.storage.num_reads - before
    assert (num_refused, num_read) == (0, len(some_prompts()))[::-1 if load_policy == "cheaper" else 1]


def test_a_slow_link_is_not_used(checkpoint, expected):  # noqa: F811
    engine = stored_engine(checkpoint, load_policy="cheaper")
    ask(engine, some_prompts())
    batcher = engine.scheduler.batcher
    batcher.rates._link_bandwidth, batcher.rates.prefill_rate.tokens_per_second = 1e3, 1e6
    batcher.rates.prefill_rate.end = lambda: None
    before = batcher.loads.num_loaded
    assert tokens_of(ask(engine, some_prompts())) == expected
    assert batcher.loads.num_loaded == before and batcher.loads.num_computed > 0


def test_short_prompts_do_not_ask_the_storage(checkpoint):  # noqa: F811
    engine = stored_engine(checkpoint)
    engine.prefetches._limits = PrefetchLimits(prefetch_threshold=10**6)
    fill_storage(engine)
    assert engine.prefetches.counters["prefetches"] == 0


def test_prefetches_share_a_small_host_memory(checkpoint, expected):  # noqa: F811
    """Half of 60 pages, for prompts of 150: they take turns, and none waits for ever."""
    engine = stored_engine(checkpoint, pages=60, max_delay=2, pages_a_step=3)
    fill_storage_beyond(engine)
    outputs = ask(engine, some_prompts(), seconds=0.0)
    assert tokens_of(outputs) == expected and engine.scheduler.batcher.loads.num_loaded_stored > 20


def fill_storage_beyond(engine):
    for prompt in some_prompts():
        ask(engine, [prompt])
        engine.cache._evict(engine.cache.num_cached)
        engine.cache.tier.poll()
    objects = dict(engine.storage.objects)
    engine.cache.flush()
    engine.storage.objects.update(objects)


def test_swapped_out_requests_stay_in_host_memory(checkpoint, expected):  # noqa: F811
    """Their pages are pinned until they are admitted again; then all are free to go."""
    small, kept = Engine(checkpoint, max_total_tokens=112, page_size=4, tiers=in_host(0.01)), []
    batcher = small.scheduler.batcher
    keep = batcher.loads.keep
    batcher.loads.keep = lambda req: (keep(req), kept.append(len(batcher.loads._kept.get(req, ()))))
    for i, prompt in enumerate(some_prompts()):
        small.start(str(i), prompt)
    while not small.scheduler.idle:
        small.scheduler.step(0.0)
        small.tracker.flush()
    assert tokens_of(small.run()) == expected
    assert batcher.retraction.num_retracted == len(kept) > 0 and max(kept) > 0
    batcher.loads.check_integrity()
    host = small.cache.tier
    assert host.reserve(host.capacity) is not None


def test_two_ranks_take_the_pages_that_both_have(checkpoint, expected, tmp_path):  # noqa: F811
    """The second rank's storage has lost every fifth page, fails and takes its time; both go on alike."""
    results = run_ranks(Path(__file__).with_name("tier_rank.py"), 2, tmp_path, str(checkpoint))
    for mine in results:
        assert mine["first"] == mine["again"] == expected
    for what in ("hits", "loaded", "stored", "again"):
        assert results[0][what] == results[1][what]
    assert 0 < sum(results[0]["hits"].values()) < sum((len(prompt) - 1) // 4 * 4 for prompt in some_prompts())
    assert results[0]["objects"] > results[1]["objects"] and results[0]["stored"] > 0
