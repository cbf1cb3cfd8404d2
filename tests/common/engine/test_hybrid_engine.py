"""Engines of hybrid models: tokens do not depend on chunks, prefix hits at snapshots, retractions or neighbours."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.hybrid import check_hybrid
from baton.tests.common.engine.test_cache_group_engine import branching_prompts as cache_group_prompts
from baton.tests.common.engine.test_cache_group_engine import random_prompt
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.hybrid_models import save_hybrid
from baton.tests.helpers.small_models import load_model_spec, server_config

PAGE = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    return folder, save_hybrid(folder)


def branching_prompts():
    return cache_group_prompts(12, longest=90, tail=40)


def run_all(engine, prompts, **sampling):
    for index, prompt in enumerate(prompts):
        engine.start(str(index), prompt, ignore_eos=True, **sampling)
    found = tokens_of(engine.run())
    return [found[str(i)] for i in range(len(prompts))]


def engine_of(checkpoint, states=64, **options):
    return Engine(checkpoint[0], page_size=options.pop("page_size", PAGE), cache={"max_mamba_cache_size": states},
                  **options)


@pytest.fixture(scope="module")
def reference(checkpoint):
    """The tokens of all prompts, each alone, without a prefix cache."""
    engine = engine_of(checkpoint, radix=False)
    return [run_all(engine, [prompt])[0] for prompt in branching_prompts()]


def test_tokens_are_transformers_own(checkpoint, reference):
    for prompt, tokens in list(zip(branching_prompts(), reference))[:4]:
        with torch.inference_mode():
            logits = checkpoint[1](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.max(1).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("overlap,chunk,radix,page_size", [
    (False, 8192, True, 4), (True, 13, True, 4), (True, 7, False, 4), (True, 16, True, 1), (False, 31, True, 32)])
def test_prompts_together(checkpoint, reference, overlap, chunk, radix, page_size):
    engine = engine_of(checkpoint, overlap=overlap, chunk=chunk, radix=radix, page_size=page_size)
    assert run_all(engine, branching_prompts()) == reference
    assert run_all(engine, branching_prompts()) == reference


def test_hits_end_at_snapshots(checkpoint, reference):
    """The prompt's last full page, the ends of its chunks and the answer's last full page."""
    engine, (prompt, *_) = engine_of(checkpoint, chunk=40), branching_prompts()
    answer = run_all(engine, [prompt], max_new_tokens=30)[0]
    text = prompt + answer
    for asked, cached in [(text + [5], 116), (prompt + [5], 88), (prompt[:87] + [5], 80), (prompt[:79] + [5], 40),
                          (prompt[:39] + [5], 0)]:
        req = engine.start("0", asked, ignore_eos=True, max_new_tokens=1)
        engine.run()
        assert req.num_cached_tokens == cached


def test_turns_of_a_conversation_hit_at_their_ends(checkpoint):
    rng = np.random.default_rng(5)
    cached, alone = engine_of(checkpoint, overlap=True), engine_of(checkpoint, radix=False)
    text = random_prompt(rng, 30)
    for turn in range(5):
        req = cached.start("0", text, ignore_eos=True, max_new_tokens=30)
        alone.start("0", text, ignore_eos=True, max_new_tokens=30)
        tokens = tokens_of(cached.run())["0"]
        assert tokens == tokens_of(alone.run())["0"]
        if turn:
            assert req.num_cached_tokens >= len(text) - 6 - PAGE
        text = text + tokens + random_prompt(rng, 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_few_states_are_evicted_alone(checkpoint, reference, overlap):
    engine = engine_of(checkpoint, states=9, overlap=overlap, chunk=24)
    group, = engine.cache.groups
    for _ in range(2):
        assert run_all(engine, branching_prompts()) == reference
    assert group.num_cached <= 9 < engine.cache.num_cached
    engine.cache.flush()
    engine.cache.check_integrity()
    assert group.num_free == group.num_pages and group.num_reserved == 0


@pytest.mark.parametrize("radix", [True, False])
def test_retracted_requests_are_computed_again(checkpoint, radix):
    prompts, sampling = branching_prompts()[:6], {"max_new_tokens": 90}
    want = run_all(engine_of(checkpoint), prompts, **sampling)
    engine = engine_of(checkpoint, max_total_tokens=440, radix=radix, overlap=True)
    assert run_all(engine, prompts, **sampling) == want
    assert engine.scheduler.batcher.retraction.num_retracted > 0


def test_a_running_request_keeps_two_states(checkpoint):
    engine = engine_of(checkpoint, chunk=32)
    req = engine.start("0", random_prompt(np.random.default_rng(1), 90), ignore_eos=True, max_new_tokens=60)
    most = []
    while not engine.scheduler.idle:
        engine.scheduler.step(0.0)
        if req.page_table is not None and req.num_output_tokens > 2 * PAGE:
            own = req.page_table.groups[0]
            most.append(int((own.ids >= 0).sum()))
    assert max(most) == 2 and len(most) > 30
    assert engine.cache.group_gauges["mamba_kv_pages_allocated"] == 0


def test_aborted_requests_leave_no_states(checkpoint):
    engine = engine_of(checkpoint, chunk=16, overlap=True)
    reqs = [engine.start(str(index), prompt, ignore_eos=True, max_new_tokens=50)
            for index, prompt in enumerate(branching_prompts()[:4])]
    for _ in range(9):
        engine.scheduler.step(0.0)
    engine.scheduler.synchronize()
    for req in reqs:
        engine.scheduler.abort(req, None)
    assert engine.scheduler.idle
    engine.cache.check_integrity()
    group, = engine.cache.groups
    assert group.num_allocated == 0 and group.num_in_tables == 0


def test_pools_of_states(checkpoint):
    """Sized by a share of the KV pool, in the type of the flag; with both types tokens begin alike."""
    found = {}
    for dtype, ratio in (("float32", 2.0), ("bfloat16", 2.0), ("float32", 4.0)):
        engine = Engine(checkpoint[0], page_size=PAGE, overlap=True, cache={
            "mamba_ssm_dtype": dtype, "mamba_full_memory_ratio": ratio})
        kv, states = engine.runner.pools
        assert states.layout.dtype == dtype
        share = ratio * engine.runner.num_pages * kv.layout.page_bytes / states.layout.page_bytes
        assert engine.cache.groups[0].num_pages == int(share) > 32
        found[dtype, ratio] = run_all(engine, branching_prompts()[:4], max_new_tokens=3)
    assert found["float32", 2.0] == found["float32", 4.0]
    assert [tokens[0] for tokens in found["bfloat16", 2.0]] == [tokens[0] for tokens in found["float32", 2.0]]


def test_what_does_not_combine_is_refused(checkpoint):
    spec = load_model_spec(server_config(checkpoint[0]).model)
    for flags, sentence in [({"speculative_algorithm": "NGRAM", "speculative_adaptive": True}, "does not measure"),
                            ({"pp_size": 2}, "pipeline stages"),
                            ({"retract_host_memory_gb": 1.0}, "leave it out"), ({"is_embedding": True}, "generation"),
                            ({"enable_two_batch_overlap": True, "two_batch_min_tokens": 64, "tp": 2, "dp_size": 2,
                              "enable_dp_attention": True}, "cuts steps within a request"),
                            ({"enable_deterministic_inference": True}, "where chunks end")]:
        with pytest.raises(ConfigError, match=sentence):
            check_hybrid(server_config(checkpoint[0], **flags), spec)
    with pytest.raises(ConfigError, match="must divide the 2 key heads"):
        dataclasses.replace(spec, num_heads=8, intermediate_size=48).check_tp(4)
