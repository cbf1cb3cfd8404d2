"""Pages of host memory and storage in the router: against plain sets, and in the choice of a worker."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.api.kv_events import Cleared, Removed, Stored, page_hashes
from baton.router.monitoring.kv_event_watch import _memory
from baton.router.policies.base import Decision
from baton.router.policies.cache_exact import CacheExact
from baton.router.workers.memory_report import MemoryReport
from baton.router.workers.tier_index import TierIndex, TierMatch
from baton.tests.router.policies.test_cache_exact import PAGE, ids, numbered, read, workers

MEDIA = "GPU", "CPU_PINNED", "DISK"


def leading(hashes, has) -> int:
    return next((i for i, value in enumerate(hashes) if not has(value)), len(hashes))


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["store", "remove", "clear"]), st.sampled_from(MEDIA),
                          st.integers(1, 3), st.integers(0, 7), st.integers(1, 8)), max_size=40))
def test_the_index_is_what_the_events_of_all_media_say(steps):
    """Two workers, of which one reads the storage; any pages of three prompts come and leave in any order."""
    index, model = TierIndex(), {(worker, medium): set() for worker in (0, 1) for medium in MEDIA}
    index.with_storage.add(1)
    prompts = [ids(0, 64) + ids(seed, 64) for seed in range(1, 4)]
    hashes = [page_hashes(prompt, PAGE) for prompt in prompts]
    for worker, kind, medium, prompt, first, count in steps:
        some = hashes[prompt - 1][first:first + count]
        have = model[0 if medium == "DISK" else worker, medium]
        if kind == "store":
            index.apply(1 if medium == "DISK" else worker, [Stored(some, None, (), PAGE, medium)])
            have |= set(some)
        elif kind == "remove":
            index.apply(1 if medium == "DISK" else worker, [Removed(some, medium)])
            have -= set(some)
        else:
            index.apply(worker, [Cleared()])
            model[worker, "GPU"].clear()
            model[worker, "CPU_PINNED"].clear()
    for tokens, chain in zip(prompts, hashes):
        cached, loads = index.match(lambda tokens=tokens: numbered(tokens))
        for worker in (0, 1):
            gpu = leading(chain, model[worker, "GPU"].__contains__)
            host = leading(chain, (model[worker, "GPU"] | model[worker, "CPU_PINNED"]).__contains__)
            stored = leading(chain, model[0, "DISK"].__contains__) if worker == 1 else 0
            expected = TierMatch(gpu, host, max(host, stored))
            assert cached.get(worker, 0) == expected.storage
            assert loads.get(worker, TierMatch(*[cached.get(worker, 0)] * 3)) == expected
    for worker in (0, 1):
        index.forget(worker)
    assert not len(index.gpu) and not len(index.loadable) and not index.with_storage


def test_other_engines_name_pages_of_host_memory_by_hash_alone():
    """vLLM's connector tells no tokens: what it names is known from the GPU's events, while it is there."""
    index, tokens = TierIndex(), ids(1, 48)
    index.apply(7, [Stored([b"a", b"b"], None, tokens[:32], PAGE)], native=False)
    index.apply(7, [Stored([b"a", b"b", b"never"], None, [], 1, "CPU_PINNED"), Removed([b"b"])], native=False)
    assert index.match(lambda: numbered(tokens)) == ({7: 2}, {7: TierMatch(1, 2, 2)})
    index.apply(7, [Removed([b"b"], "CPU_PINNED")], native=False)
    assert index.match(lambda: numbered(tokens)) == ({7: 1}, {})
    assert index.gpu.page_sizes == index.loadable.page_sizes == {7: PAGE}


@pytest.mark.parametrize("host_cost, winner", [(0.12, 0), (3.0, 1)])
def test_a_worker_that_loads_a_prompt_is_preferred_to_one_that_computes_it(host_cost, winner):
    """Worker 1 has a third of it on its GPU, worker 0 all of it in host memory."""
    pool, policy, tokens = workers(3), CacheExact(host_cost=host_cost), ids(1, 480)
    hashes = page_hashes(tokens, PAGE)
    policy.on_events(pool[0], [Stored(hashes, None, tokens, PAGE, "CPU_PINNED")])
    policy.on_events(pool[1], [Stored(hashes[:10], None, tokens[:160], PAGE)])
    subject, _ = read(policy, {"input_ids": tokens})
    assert policy.choose(pool, subject) == Decision(pool[winner], "cache_hit")
    again = policy.of_another_model()
    assert again.choose(pool, read(again, {"input_ids": tokens})[0]).worker is pool[winner]


def test_workers_report_what_loads_cost_and_flags_replace_it():
    pool, tokens = workers(2), ids(1, 480)
    stored = [Stored(page_hashes(tokens, PAGE), None, tokens, PAGE, "CPU_PINNED")]
    ranks = [{"num_tokens": 0, "max_total_num_tokens": 16_000} | own for own in ({}, {"host_page_cost": 0.5})]
    report = _memory(ranks)
    assert report == MemoryReport(0, 32_000, 0, 0.5, None) and _memory([{"num_tokens": 1}]) is None

    def costs(policy: CacheExact) -> list[float]:
        for worker in pool:
            policy.on_events(worker, stored)
        policy.on_memory(pool[0], report)
        match = policy._match(read(policy, {"input_ids": tokens})[0], frozenset(worker.id for worker in pool))
        return [policy.costs.prefill_cost(worker, match) for worker in pool]

    policy = CacheExact()
    assert costs(policy) == pytest.approx([30 * 0.5, 30 * 0.12])
    policy.on_no_memory(pool[0])
    assert policy.costs._load_costs_of(0.5, None) == (0.5, 0.6) and pool[0].id not in policy.costs.load_costs
    assert costs(CacheExact(host_cost=0.2)) == pytest.approx([30 * 0.2] * 2)


def test_pages_on_the_gpu_are_preferred_to_those_in_host_memory_and_these_to_storage():
    pool, tokens = workers(3), ids(1, 480)
    hashes = page_hashes(tokens, PAGE)
    policy = CacheExact()
    for worker in pool:
        policy.on_storage(worker, True)
    policy.on_events(pool[2], [Stored(hashes, None, tokens, PAGE, "DISK")])
    subject, _ = read(policy, {"input_ids": tokens})
    costs = {worker: policy.costs.prefill_cost(worker, policy._match(subject, frozenset(w.id for w in pool)))
             for worker in pool}
    assert list(costs.values()) == pytest.approx([30 * 0.6] * 3)  # all can read it
    policy.on_events(pool[1], [Stored(hashes[:29], None, tokens[:464], PAGE, "CPU_PINNED")])
    policy.on_events(pool[0], [Stored(hashes[:5], None, tokens[:80], PAGE)])
    match = policy._match(subject, frozenset(worker.id for worker in pool))
    assert [policy.costs.prefill_cost(worker, match) for worker in pool] == pytest.approx(
        [25 * 0.6, 29 * 0.12 + 0.6, 30 * 0.6])
    assert [match.on_gpu(worker.id) for worker in pool] == [5, 0, 0]
    policy.on_storage(pool[0], False)
    match = policy._match(subject, frozenset(worker.id for worker in pool))
    assert policy.costs.prefill_cost(pool[0], match) > 25


def test_a_prompt_that_was_just_sent_is_loaded_already():
    pool, policy, tokens = workers(2), CacheExact(), ids(1, 480)
    policy.on_events(pool[0], [Stored(page_hashes(tokens, PAGE), None, tokens, PAGE, "CPU_PINNED")])
    subject, _ = read(policy, {"input_ids": tokens})
    among = frozenset(worker.id for worker in pool)
    assert policy._match(subject, among).loads == {pool[0].id: TierMatch(0, 30, 30)}
    assert policy.choose(pool, subject).worker is pool[0]
    assert policy._match(subject, among).loads == {pool[0].id: TierMatch(30, 30, 30)}


def test_a_worker_with_many_pages_on_the_gpu_gets_a_host_tier():
    """Its first event of host memory brings what is on its GPU into the index of both."""
    index, rng = TierIndex(), Random(1)
    tokens = [rng.randrange(30_000) for _ in range(1600)]
    hashes = page_hashes(tokens, PAGE)
    index.apply(1, [Stored(hashes[:60], None, tokens[:960], PAGE)])
    assert not len(index.loadable)
    index.apply(1, [Stored(hashes[60:], hashes[59], tokens[960:], PAGE, "CPU_PINNED")])
    assert index.match(lambda: numbered(tokens)) == ({1: 100}, {1: TierMatch(60, 100, 100)})
    index.apply(1, [Cleared()])
    assert index.match(lambda: numbered(tokens)) == ({}, {})
