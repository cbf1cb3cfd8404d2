"""Prefix hits from KV tiers after eviction: tokens equal those of recomputation, whatever a tier does meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from baton.common.api.namespace import Namespace
from baton.tests.helpers import dict_tier
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.rank_processes import run_ranks

VOCAB = 96
SMALL = {"max_total_tokens": 160, "page_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3,
    )).save_pretrained(folder)
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
    return Engine(checkpoint, **SMALL | {"cache": {"kv_tier": name, "kv_tier_gb": 0.01}} | options)


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
    engine = tiered(checkpoint, "host", cache={"kv_tier": "host", "kv_tier_gb": 30 * page / 2**30})
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


def test_two_ranks_take_the_pages_that_both_have(checkpoint, expected, tmp_path):
    """The second rank's tier loses every fifth page and takes its time; both go on alike."""
    results = run_ranks(Path(__file__).with_name("tier_rank.py"), 2, tmp_path, str(checkpoint))
    for mine in results:
        assert mine["first"] == mine["again"] == expected
    for what in ("hits", "loaded", "again"):
        assert results[0][what] == results[1][what]
    assert 0 < sum(results[0]["hits"].values()) < sum((len(prompt) - 1) // 4 * 4 for prompt in some_prompts())
    assert results[0]["kept"] > results[1]["kept"]
