"""Engines whose layers with a sliding window have a pool of their own: tokens equal those of one pool for all layers,
and transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.tests.helpers.gpt_oss_models import WINDOW, save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.toy_proposer import RepeatLastTokens

PAGE, VOCABULARY = 4, 97


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    return folder, save_gpt_oss(folder)


def random_prompt(rng, count):
    return rng.integers(3, VOCABULARY, count).tolist()


def branching_prompts(count=14, longest=150, tail=60):
    """Prompts that share beginnings of all lengths; by default of up to ten windows."""
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, longest)]
    for _ in range(count - 1):
        shared = prompts[rng.integers(len(prompts))]
        prompts.append(shared[:rng.integers(1, len(shared))] + random_prompt(rng, int(rng.integers(1, tail))))
    return prompts


def start_all(engine, prompts, **sampling):
    for index, prompt in enumerate(prompts):
        engine.start(str(index), prompt, ignore_eos=True, **sampling)


def run_all(engine, prompts, **sampling):
    start_all(engine, prompts, **sampling)
    return tokens_of(engine.run())


def engine_of(checkpoint, *, hybrid=True, **options):
    cache = {"disable_hybrid_swa_memory": not hybrid, **options.pop("cache", {})}
    engine = Engine(checkpoint[0], page_size=PAGE, cache=cache, **options)
    assert len(engine.runner.pools) == 1 + hybrid
    return engine


@pytest.fixture(scope="module")
def reference(checkpoint):
    """The tokens of all prompts, each alone, without a prefix cache."""
    return [run_all(engine_of(checkpoint, hybrid=False, radix=False), [prompt])["0"] for prompt in branching_prompts()]


def test_tokens_are_transformers_own(checkpoint, reference):
    model = checkpoint[1]
    for prompt, tokens in list(zip(branching_prompts(), reference))[:4]:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.max(1).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [8192, 13])
@pytest.mark.parametrize("radix", [True, False])
def test_prompts_together(checkpoint, reference, overlap, chunk, radix):
    engine = engine_of(checkpoint, overlap=overlap, chunk=chunk, radix=radix)
    found = run_all(engine, branching_prompts())
    assert [found[str(i)] for i in range(len(found))] == reference


def test_prompts_one_after_the_other_hit_at_their_branches(checkpoint, reference):
    hybrid, single = engine_of(checkpoint, chunk=40), engine_of(checkpoint, hybrid=False, chunk=40)
    for prompt, tokens in zip(branching_prompts(), reference):
        cached = []
        for engine in (hybrid, single):
            req = engine.start("0", prompt, ignore_eos=True)
            assert tokens_of(engine.run())["0"] == tokens
            cached.append(req.num_cached_tokens)
        assert cached[0] == cached[1]  # the pool has room for all pages


def test_turns_of_a_conversation_hit_at_their_ends(checkpoint):
    rng = np.random.default_rng(5)
    hybrid, single = engine_of(checkpoint), engine_of(checkpoint, hybrid=False, radix=False)
    text = random_prompt(rng, 70)
    for _ in range(5):
        req = hybrid.start("0", text, ignore_eos=True, max_new_tokens=30)
        single.start("0", text, ignore_eos=True, max_new_tokens=30)
        tokens = tokens_of(hybrid.run())["0"]
        assert tokens == tokens_of(single.run())["0"]
        if len(text) > 70:
            assert req.num_cached_tokens >= len(text) - 6 - PAGE
        text = text + tokens + random_prompt(rng, 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_little_memory_evicts_and_retracts(checkpoint, reference, overlap):
    """The pool of windowed layers has room for a few requests."""
    engine = engine_of(checkpoint, overlap=overlap, chunk=24, max_total_tokens=320,
                       cache={"swa_full_tokens_ratio": 0.2})
    group, = engine.cache.groups
    assert group.num_pages == 16
    prompts = branching_prompts()
    for _ in range(2):
        found = run_all(engine, prompts)
        assert [found[str(i)] for i in range(len(found))] == reference
    engine.cache.flush()
    assert group.num_free == group.num_pages and group.num_reserved == 0


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("radix", [True, False])
def test_retracted_requests_are_computed_again_or_swapped(checkpoint, swaps, radix):
    prompts = branching_prompts()[:6]
    sampling = {"max_new_tokens": 90}
    want = run_all(engine_of(checkpoint, hybrid=False), prompts, **sampling)
    schedule = {"retract_host_memory_gb": 0.01} if swaps else {}
    engine = engine_of(checkpoint, max_total_tokens=640, radix=radix, schedule=schedule)
    assert run_all(engine, prompts, **sampling) == want
    batcher = engine.scheduler.batcher
    assert batcher.retraction.num_retracted > 0
    if swaps:
        assert batcher.swap.num_swapped_out > 0 and not any(tier.num_pages for tier in batcher.swap.tiers)


def test_a_running_request_keeps_a_window_and_a_page(checkpoint):
    engine = engine_of(checkpoint, radix=False, chunk=32)
    req = engine.start("0", random_prompt(np.random.default_rng(1), 120), ignore_eos=True, max_new_tokens=60)
    most = []
    while not engine.scheduler.idle:
        engine.scheduler.step(0.0)
        if req.page_table is not None and req.num_output_tokens > 2 * PAGE:
            most.append(len(req.page_table.groups[0].ids))
    assert max(most) == WINDOW // PAGE + 1 and len(most) > 30
    group, = engine.cache.groups
    assert group.num_free == group.num_pages


@pytest.mark.parametrize("hybrid", [True, False])
def test_drafts_beyond_the_next_page(checkpoint, reference, hybrid):
    """Several tokens a step, of which few are accepted: their pages are stored again."""
    engine = engine_of(checkpoint, hybrid=hybrid, proposer=RepeatLastTokens(), max_drafts=7, chunk=30)
    found = run_all(engine, branching_prompts())
    assert [found[str(i)] for i in range(len(found))] == reference
    assert engine.drafting.num_drafted > 0
