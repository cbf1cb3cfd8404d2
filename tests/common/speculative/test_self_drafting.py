"""A model that drafts for itself: whatever the engine does meanwhile, all its drafts are right, greedy or sampled."""

from __future__ import annotations

import pytest

from baton.common.config.server.speculative import SpeculativeArgs
from baton.tests.helpers.hand_driven import Engine, sharing_prompts, start_all, tokens_of

VOCAB = 24
REQUESTS = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 9},
            {"max_new_tokens": 3}, {"temperature": 1.0, "seed": 7, "stop_token_ids": (1, 2)}]


def answers(checkpoint, **options):
    engine = Engine(checkpoint, **options)
    start_all(engine, sharing_prompts(20, VOCAB), REQUESTS)
    return engine, tokens_of(engine.run())


@pytest.fixture(scope="module")
def expected(checkpoint):
    return answers(checkpoint)[1]


@pytest.mark.parametrize("options", [
    {}, {"page_size": 1, "chunk": 7, "overlap": True}, {"page_size": 16, "chunk": 20, "max_running": 4},
    {"max_total_tokens": 160, "chunk": 20, "overlap": True},
    {"chunk": 9, "max_total_tokens": 112, "schedule": {"enable_mixed_chunk": True}}], ids=str)
def test_all_drafts_are_accepted(checkpoint, expected, options):
    args = SpeculativeArgs(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(checkpoint))
    engine, found = answers(checkpoint, speculative=args, **options)
    assert found == expected
    assert (engine.scheduler.batcher.retraction.num_retracted > 0) == ("max_total_tokens" in options)
    assert engine.drafting.num_accepted == engine.drafting.num_drafted > 100
