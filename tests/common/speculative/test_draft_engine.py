"""Draft models through the whole engine: tokens are those without them."""

from __future__ import annotations

import pytest

from baton.common.config.server import SpeculativeArgs
from baton.tests.common.speculative.test_drafting_engine import answers
from baton.tests.helpers.deepseek_models import save_with_predictors


def drafting(folder, algorithm: str, **flags) -> SpeculativeArgs:
    return SpeculativeArgs(speculative_algorithm=algorithm, speculative_draft_model_path=folder and str(folder),
                           speculative_num_steps=4, **flags)


OPTIONS = [{}, {"overlap": True}, {"page_size": 1, "chunk": 7}, {"max_total_tokens": 128, "chunk": 20},
           {"page_size": 16, "chunk": 9, "schedule": {"enable_mixed_chunk": True}}]


@pytest.mark.parametrize(("algorithm", "options"), [
    *(("EAGLE3", options) for options in OPTIONS), *(("STANDALONE", options) for options in OPTIONS),
    ("EAGLE", OPTIONS[2]), ("NEXTN", OPTIONS[3])], ids=str)
def test_tokens_equal_those_without_drafts(models, undrafted, algorithm, options):
    engine, found = answers(models / "model", speculative=drafting(models / algorithm, algorithm), **options)
    assert found == undrafted
    assert engine.drafting.num_drafted > 100


def test_the_drafts_cache_is_of_the_models_type(models):
    float8 = {"kv_cache_dtype": "fp8_e4m3"}
    expected = answers(models / "model", **float8)[1]
    for algorithm in ("EAGLE3", "STANDALONE"):
        engine, found = answers(models / "model", speculative=drafting(models / algorithm, algorithm), **float8)
        assert found == expected and engine.runner.draft_pool.layout.dtype == "float8_e4m3fn"


@pytest.mark.parametrize("depth", [1, 2])
def test_latent_layers_with_experts(tmp_path, depth):
    """DeepSeek's own layers: the first repeats tokens, so that some drafts are accepted."""
    save_with_predictors(tmp_path, depth, echo=3.0, eos_token_id=None)
    expected = answers(tmp_path)[1]
    for options in ({}, {"chunk": 7, "page_size": 1}):
        engine, found = answers(tmp_path, speculative=drafting(None, "NEXTN"), **options)
        assert found == expected and engine.drafting.num_accepted > 0
