"""Prefix hits from KV tiers after eviction: tokens equal those of recomputation, whatever a tier does meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.api.namespace import Namespace
from baton.tests.helpers import dict_tier
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import save_steep_qwen3
from baton.tests.helpers.tiers import in_host

VOCAB = 96
SMALL = {"max_total_tokens": 160, "page_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_steep_qwen3(folder, vocab_size=VOCAB, num_hidden_layers=3)
    return folder


def some_prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(9, 90, 12)]


@pytest.fixture(scope="module")
def expected(checkpoint):
    engine = Engine(checkpoint)
    for i, prompt in enumerate(some_prompts()):
        engine.start(str(i), prompt)
    return tokens_of(engine.run())


def tiered(checkpoint, name: str, **options) -> Engine:
    return Engine(checkpoint, **SMALL | {"tiers": in_host(0.01, name)} | options)


def run(engine: Engine) -> list:
    """Step until idle; a step that launches nothing may still wait for a tier."""
    for _ in range(10_000):
        if engine.scheduler.idle:
            break
        engine.scheduler.step(0.0)
        engine.tracker.flush()
    return engine.run()


def ask_all(engine: Engine, **fields) -> list:
    for i, prompt in enumerate(some_prompts()):
        engine.start(str(i), prompt, fields=fields)
    return run(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["dict", "slow-dict", "host"])
def test_evicted_prefixes_are_loaded(checkpoint, expected, name, overlap):
    """The pool has 40 pages, the prompts have 150: they come back from the tier, no full page of them is computed
    again, and every answer is the same."""
    engine = tiered(checkpoint, name, overlap=overlap)
    assert tokens_of(ask_all(engine)) == expected
    tier, loads = engine.cache.tier, engine.scheduler.batcher.loads
    assert tier.num_pages >= 100
    before = loads.num_loaded
    outputs = ask_all(engine)
    assert tokens_of(outputs) == expected
    hits = {item.rid: item.num_cached_tokens for item in outputs}
    assert hits == {str(i): (len(prompt) - 1) // 4 * 4 for i, prompt in enumerate(some_prompts())}
    assert loads.num_loaded - before >= 80 and len(loads) == 0 and tier.counters.loaded >= loads.num_loaded
    usages = [item.extras.usage for item in outputs if item.extras and item.extras.usage]
    of_prompts = sum(usage.loaded.host for usage in usages)  # retracted requests load what they had computed, too
    assert 4 * 80 <= of_prompts <= 4 * (loads.num_loaded - before)
    assert all(usage.loaded.host <= usage.num_cached_tokens and not usage.loaded.storage_backend for usage in usages)
    assert tokens_of(ask_all(engine, namespace=Namespace("other"))) == expected


def test_a_tier_shares_nothing_between_namespaces(checkpoint):
    engine = tiered(checkpoint, "dict")
    prompt = some_prompts()[0]
    cached = []
    for salt in ("a", "b", "a"):
        engine.start("x", prompt, fields={"namespace": Namespace(salt)})
        cached.append(run(engine)[-1].num_cached_tokens)
        engine.cache._evict(engine.cache.num_cached)
        assert engine.cache.num_cached == 0
    assert cached == [0, 0, (len(prompt) - 1) // 4 * 4]


def test_a_flush_empties_the_tier(checkpoint, expected):
    engine = tiered(checkpoint, "host")
    ask_all(engine)
    engine.cache.flush()
    assert engine.cache.tier.num_pages == 0 == engine.cache.num_cached
    engine.start("0", some_prompts()[0])
    outputs = run(engine)
    assert outputs[-1].num_cached_tokens == 0 and tokens_of(outputs) == {"0": expected["0"]}


def test_a_small_tier_drops_the_least_recently_used(checkpoint, expected):
    page = tiered(checkpoint, "dict").cache.tier.page_bytes
    engine = tiered(checkpoint, "host", tiers=in_host(30.5 * page / 1e9))
    for _ in range(2):
        assert tokens_of(ask_all(engine)) == expected
        assert engine.cache.tier.num_pages <= engine.cache.tier.capacity == 30
    assert engine.cache.tier.counters.evicted > 0


def test_what_a_tier_loses_on_the_way_is_computed(checkpoint, expected, monkeypatch):
    """Its lookup names pages of which its load finds only the first half."""
    engine = tiered(checkpoint, "slow-dict")
    ask_all(engine)
    monkeypatch.setattr(dict_tier.DictTier, "load", half_of(dict_tier.DictTier.load))
    outputs = ask_all(engine)
    assert tokens_of(outputs) == expected and engine.scheduler.batcher.loads.num_loaded > 0
    assert any(item.num_cached_tokens < len(some_prompts()[int(item.rid)]) // 2 for item in outputs)


def half_of(load):
    return lambda self, keys, page_ids: load(self, keys[:len(keys) // 2], page_ids)


def test_requests_that_leave_while_they_load_give_their_pages_back(checkpoint, expected):
    """Not before the copies into these have ended."""
    engine = tiered(checkpoint, "slow-dict")
    ask_all(engine)
    batcher = engine.scheduler.batcher
    reqs = [engine.start(str(i), prompt) for i, prompt in enumerate(some_prompts())]
    while not batcher.queues.loading:
        engine.scheduler.step(0.0)
    leaving = [req for req in reqs if req in batcher.queues.loading]
    engine.scheduler.synchronize()
    for req in leaving:
        engine.scheduler.abort(req, None)
        engine.tracker.drop(req)
    assert not batcher.queues.loading and len(batcher.loads) == len(leaving)
    assert engine.cache.num_allocated > 0 and not engine.scheduler.idle
    outputs = run(engine)
    rest = {str(i) for i in range(12)} - {req.rid for req in leaving}
    assert tokens_of(outputs) == {rid: expected[rid] for rid in rest}


def test_a_pause_that_retracts_waits_for_loads(checkpoint, expected):
    engine = tiered(checkpoint, "slow-dict")
    ask_all(engine)
    batcher = engine.scheduler.batcher
    for i, prompt in enumerate(some_prompts()):
        engine.start(str(i), prompt)
    while not batcher.queues.loading:
        engine.scheduler.step(0.0)
    engine.scheduler.synchronize()
    batcher.pause("retract")
    for _ in range(dict_tier.SLOW_POLLS + 1):
        assert not engine.scheduler.step(0.0)
    assert engine.cache.num_allocated == 0 and batcher.num_waiting == len(engine.tracker.live)
    batcher.paused = None
    assert tokens_of(run(engine)) == expected


def test_retracted_requests_return_from_the_tier(checkpoint, expected):
    """Their output, too: a pool that is too small for all writes it to the tier and reads it back."""
    engine = tiered(checkpoint, "dict", max_total_tokens=112)
    outputs = ask_all(engine)
    assert tokens_of(outputs) == expected
    batcher = engine.scheduler.batcher
    assert batcher.retraction.num_retracted > 0 and batcher.loads.num_loaded > 0
