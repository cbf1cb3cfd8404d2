"""Engines with pools for sliding windows whose pages come back from the host tier: a page is that of all pools."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server.tiers import WRITE_POLICIES
from baton.common.kvcache.tiers import host
from baton.tests.common.engine.test_cache_group_engine import PAGE, branching_prompts
from baton.tests.helpers import dict_tier  # noqa: F401 (registers it)
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, ask, evict, tokens_of
from baton.tests.helpers.late_copies import LateCopies

TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 30.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    save_gpt_oss(folder)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint):
    engine = Engine(checkpoint, page_size=PAGE, radix=False)
    return [ask(engine, prompt)[0] for prompt in branching_prompts()]


@pytest.mark.parametrize("policy", WRITE_POLICIES.names)
def test_prompts_come_back_whole(checkpoint, reference, policy):
    """Into pages of both pools that others have used; of the window's only the last."""
    engine = Engine(checkpoint, page_size=PAGE, chunk=40, tiers=TIERS | {"hicache_write_policy": policy})
    group, = engine.cache.groups
    for _ in range(2 if policy == "write_through_selective" else 1):  # which keeps what is used twice
        for prompt, tokens in zip(branching_prompts(), reference):
            assert ask(engine, prompt)[0] == tokens
    evict(engine)
    for prompt, tokens in zip(branching_prompts(), reference):
        assert ask(engine, prompt) == (tokens, (len(prompt) - 1) // PAGE * PAGE)
        evict(engine)
    assert engine.cache.tier.counters.loaded > 200
    engine.cache.flush()
    assert group.num_free == group.num_pages and group.num_reserved == 0


@pytest.mark.parametrize("late,policy", [(None, "write_through"), (1, "write_through"), (2, "write_back"),
                                         (3, "write_through_selective")])
@pytest.mark.parametrize("overlap", [False, True])
def test_little_memory(checkpoint, reference, monkeypatch, overlap, late, policy):
    """Windows' pages leave before the others, and are found in the tier; with a seed ``late``, copies may end late, and
    steps begin early."""
    made, rng = [], np.random.default_rng(late)

    def copies(context, memory):
        made.append(LateCopies(context, memory))
        return made[0]

    if late:
        monkeypatch.setattr(host, "HostPageCopies", copies)
        monkeypatch.setattr(host.HostTier, "is_hidden", lambda self, copy, seconds: bool(rng.integers(2)))
    engine = Engine(checkpoint, page_size=PAGE, overlap=overlap, chunk=24, max_total_tokens=320,
                    cache={"swa_full_tokens_ratio": 0.2}, tiers=TIERS | {"hicache_write_policy": policy})
    prompts = branching_prompts()
    for _ in range(2):
        for index, prompt in enumerate(prompts):
            engine.start(str(index), prompt, ignore_eos=True)
        while not engine.scheduler.idle:
            engine.scheduler.step(0.0)
            engine.tracker.flush()
            if late:
                made[0].run_some(rng)
        found = tokens_of(engine.run())
        assert [found[str(i)] for i in range(len(found))] == reference
    assert engine.cache.tier.counters.loaded > 50
    engine.cache.tier.check_integrity()
    engine.cache.flush()


@pytest.mark.parametrize("overlap", [False, True])
def test_turns_of_a_conversation_find_prompts_and_answers(checkpoint, overlap):
    """Answers of many windows are published while their pages are there."""
    rng = np.random.default_rng(5)
    engine = Engine(checkpoint, page_size=PAGE, overlap=overlap, tiers=TIERS)
    single = Engine(checkpoint, page_size=PAGE, radix=False)
    text = rng.integers(3, 97, 30).tolist()
    for turn in range(3):
        evict(engine)
        req = engine.start("0", text, ignore_eos=True, max_new_tokens=70)
        while not engine.scheduler.idle:
            engine.scheduler.step(0.0)
            engine.tracker.flush()
        tokens = tokens_of(engine.run())["0"]
        single.start("0", text, ignore_eos=True, max_new_tokens=70)
        assert tokens == tokens_of(single.run())["0"]
        assert not turn or req.num_cached_tokens >= len(text) - 6 - PAGE
        text = text + tokens + rng.integers(3, 97, 5).tolist()


def test_another_tier_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="--kv-tier dict does not keep the pages of sliding windows"):
        Engine(checkpoint, page_size=PAGE, tiers=TIERS | {"kv_tier": "dict"})


def test_a_storage_keeps_all_pools(checkpoint, reference, tmp_path):
    """A second engine, with nothing in its memory, finds what the first one wrote."""
    folder = json.dumps({"storage_dir": str(tmp_path), "prefetch_threshold": 1, "stall_seconds": 20})
    tiers = TIERS | {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
                     "hicache_storage_backend_extra_config": folder}
    prompt, tokens = branching_prompts()[0], reference[0]
    for cached in (0, (len(prompt) - 1) // PAGE * PAGE):
        engine = Engine(checkpoint, page_size=PAGE, chunk=40, tiers=tiers)
        assert ask(engine, prompt) == (tokens, cached)
        end = time.monotonic() + 20
        while len([path for path in tmp_path.rglob("*") if path.is_file()]) < len(prompt) // PAGE:
            engine.scheduler.step(0.0)
            assert time.monotonic() < end
        engine.scheduler.batcher.loads.close()
