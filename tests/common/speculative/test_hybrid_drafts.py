"""Drafts of hybrid models: states continue from the last accepted draft, so tokens equal those without drafts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.hybrid import check_hybrid
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.speculative.ngram import NgramProposer
from baton.tests.common.speculative.test_drafting_engine import Oracle
from baton.tests.helpers.family_parity import save_random
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.hybrid_models import MAMBA, add_draft_layer, save_hybrid
from baton.tests.helpers.small_models import load_model_spec, server_config

VOCAB = 97


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid(folder)
    return folder


def prompts():
    rng = np.random.default_rng(0)
    stem = rng.integers(0, VOCAB, 30).tolist()
    return [stem[:int(rng.integers(0, 30))] + rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
            for _ in range(10)]


def answers(engine, waves=1):
    for _ in range(waves):  # the second time over the prefix cache
        for rid, prompt in enumerate(prompts()):
            engine.start(str(rid), prompt, ignore_eos=True, max_new_tokens=(3, 20, 33)[rid % 3])
        found = tokens_of(engine.run())
    return found


@pytest.fixture(scope="module")
def expected(checkpoint):
    return answers(Engine(checkpoint, cache={"max_mamba_cache_size": 64}))


@pytest.mark.parametrize("states,options", [
    (64, {"overlap": True, "page_size": 1, "chunk": 7}), (16, {"overlap": True, "chunk": 9, "max_drafts": 7}),
    (64, {"page_size": 16, "max_total_tokens": 160, "chunk": 20}),
    (64, {"chunk": 9, "schedule": {"enable_mixed_chunk": True}})], ids=str)
def test_tokens_equal_those_without_drafts(checkpoint, expected, states, options):
    for proposer in (Oracle(expected), *([] if "schedule" in options else [NgramProposer(SpeculativeArgs())])):
        engine = Engine(checkpoint, proposer=proposer, cache={"max_mamba_cache_size": states}, **options)
        assert answers(engine, 2) == expected
        assert engine.drafting.num_accepted > 0
        group, = engine.cache.groups
        engine.cache.flush()
        engine.cache.check_integrity()
        assert group.num_free == group.num_pages and group.num_reserved == 0
        if isinstance(proposer, Oracle):
            assert set(proposer.accepted) >= {0, 1, 2, 3}


def test_steps_with_and_without_drafts_alternate(checkpoint, expected):
    """Pages that were allocated for refused drafts are reached by plain steps."""
    class Sometimes(Oracle):
        def propose(self, reqs, limits):
            return super().propose(reqs, limits) if next(self.calls) % 5 < 2 else [None] * len(reqs)

    for page_size in (1, 4):
        engine = Engine(checkpoint, proposer=Sometimes(expected), overlap=True, page_size=page_size,
                        cache={"max_mamba_cache_size": 64})
        assert answers(engine) == expected
        assert engine.drafting.num_accepted > 0


def test_an_abort_frees_the_pages_of_drafts(checkpoint, expected):
    engine = Engine(checkpoint, proposer=Oracle(expected), cache={"max_mamba_cache_size": 64})
    req = engine.start("1", prompts()[1], max_new_tokens=30)
    group, = engine.cache.groups
    while not (req.page_table and len(req.page_table.groups[0].drafts)):
        engine.drafting._keep_accepted = lambda *step: None  # as if the step were still in flight
        engine.scheduler.step(0.0)
    engine.scheduler.synchronize()
    engine.scheduler.abort(req, None)
    engine.cache.check_integrity()
    assert engine.cache.num_allocated == 0 and group.num_allocated == 0


def test_mamba(tmp_path):
    save_random(tmp_path, "FalconH1", std=0.3, **MAMBA, vocab_size=VOCAB)
    want = answers(Engine(tmp_path, cache={"max_mamba_cache_size": 64}))
    engine = Engine(tmp_path, proposer=Oracle(want), cache={"max_mamba_cache_size": 64})
    assert answers(engine) == want
    assert engine.drafting.num_accepted > 0


def test_a_draft_model(checkpoint, expected, tmp_path):
    """Its keys and values have the page ids of the model's attention layers."""
    save_random(tmp_path, "Qwen3", std=0.3, vocab_size=VOCAB)
    engine = Engine(checkpoint, speculative=SpeculativeArgs("STANDALONE", str(tmp_path)), overlap=True, chunk=7,
                    cache={"max_mamba_cache_size": 64})
    assert answers(engine, 2) == expected
    assert engine.drafting.num_drafted > 0


def test_layers_of_multi_token_prediction(tmp_path):
    model = save_hybrid(tmp_path)
    add_draft_layer(tmp_path, model)
    want = answers(Engine(tmp_path, cache={"max_mamba_cache_size": 64}))
    for options in ({}, {"overlap": True, "page_size": 1, "chunk": 7}):
        engine = Engine(tmp_path, speculative=SpeculativeArgs("NEXTN"), cache={"max_mamba_cache_size": 64}, **options)
        assert answers(engine, 2) == want
        assert engine.drafting.num_drafted > 0


def test_trees_are_refused(checkpoint):
    config = server_config(checkpoint)
    spec = load_model_spec(config.model)
    trees = SpeculativeArgs("NGRAM", speculative_ngram_max_bfs_breadth=2)
    with pytest.raises(ConfigError, match="no trees"):
        check_hybrid(dataclasses.replace(config, speculative=trees), spec)
