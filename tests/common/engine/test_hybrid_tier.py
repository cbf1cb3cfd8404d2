"""Hybrid models whose pages and states come back from host memory."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.kvcache.tiers import host
from baton.tests.common.engine.test_cache_group_engine import branching_prompts
from baton.tests.helpers.hand_driven import Engine, ask, evict, tokens_of
from baton.tests.helpers.hybrid_models import add_draft_layer, save_hybrid
from baton.tests.helpers.late_copies import LateCopies

PAGE, CHUNK = 4, 40
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 30.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid(folder)
    return folder


def prompts():
    return branching_prompts(12, longest=90, tail=40)


def engine_of(checkpoint, states=64, **options):
    return Engine(checkpoint, page_size=PAGE, cache={"max_mamba_cache_size": states}, **options)


@pytest.fixture(scope="module")
def reference(checkpoint):
    engine = engine_of(checkpoint, radix=False)
    return [ask(engine, prompt)[0] for prompt in prompts()]


def test_prompts_come_back_with_a_state(checkpoint, reference):
    engine = engine_of(checkpoint, chunk=CHUNK, tiers=TIERS)
    for prompt, tokens in zip(prompts(), reference):
        assert ask(engine, prompt)[0] == tokens
    evict(engine)
    for prompt, tokens in zip(prompts(), reference):
        last = PAGE if len(prompt) % PAGE else CHUNK  # the states are those of the last full page, and of chunks' ends
        assert ask(engine, prompt) == (tokens, (len(prompt) - 1) // last * last)
        evict(engine)
    tier, (group,) = engine.cache.tier, engine.cache.groups
    assert tier.pages.counters.loaded > 150 and 10 < tier.states.counters.loaded < 40
    tier.check_integrity()
    engine.cache.flush()
    assert group.num_free == group.num_pages and group.num_reserved == tier.num_pages == tier.states.num_pages == 0


@pytest.mark.parametrize("late,policy", [(None, "write_through"), (1, "write_through"), (2, "write_back"),
                                         (3, "write_through_selective")])
@pytest.mark.parametrize("overlap", [False, True])
def test_little_memory(checkpoint, reference, monkeypatch, overlap, late, policy):
    """Few states on the device, and few pages and states in host memory, where states go with their pages; with a seed
    ``late``, copies may end late."""
    made, rng = [], np.random.default_rng(late)

    def copies(context, memory):
        made.append(LateCopies(context, memory))
        return made[-1]

    if late:
        monkeypatch.setattr(host, "HostPageCopies", copies)
    engine = engine_of(checkpoint, states=9, overlap=overlap, chunk=24, max_total_tokens=320,
                       tiers=TIERS | {"hicache_ratio": 1.6, "hicache_write_policy": policy})
    tier, loads = engine.cache.tier, engine.scheduler.batcher.loads
    for _ in range(3):
        for index in rng.permutation(len(reference)).tolist():
            engine.start(str(index), prompts()[index], ignore_eos=True)
        while not engine.scheduler.idle:
            for each in made:
                each.run_some(rng)
            engine.scheduler.step(0.0)
            engine.tracker.flush()
        assert tokens_of(engine.run()) == {str(index): tokens for index, tokens in enumerate(reference)}
        tier.check_integrity()
    assert loads.num_loaded > 5 and (policy == "write_through_selective" or tier.states.counters.evicted > 0)


def test_drafts_and_host_memory(tmp_path):
    """The draft layer's keys and values come back with the pages, the state with the last one."""
    add_draft_layer(tmp_path, save_hybrid(tmp_path))
    plain = engine_of(tmp_path, radix=False)
    engine = engine_of(tmp_path, chunk=CHUNK, tiers=TIERS, speculative=SpeculativeArgs("NEXTN"))
    for _ in range(2):
        for prompt in prompts()[:6]:
            assert ask(engine, prompt)[0] == ask(plain, prompt)[0]
        evict(engine)
    assert engine.cache.tier.states.counters.loaded > 3 and engine.drafting.num_drafted > 0
    engine.cache.tier.check_integrity()


def test_a_state_leaves_with_its_page(checkpoint, reference):
    engine = engine_of(checkpoint, chunk=40, tiers=TIERS)
    tier = engine.cache.tier
    for prompt in prompts()[:4]:
        ask(engine, prompt)
    keys = list(tier.states.keys)
    assert 4 < len(keys) < tier.num_pages
    tier.free(keys[:3])
    assert list(tier.states.keys) == keys[3:]
    tier.check_integrity()
