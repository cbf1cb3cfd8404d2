"""A drafter on the device through the whole engine: equal tokens, and no row that it was not shown."""

from __future__ import annotations

import pytest

from baton.tests.helpers.hand_driven import Engine, finishes_of, sharing_prompts, start_all, tokens_of
from baton.tests.helpers.table_drafter import TableDrafter

VOCAB = 24
REQUESTS = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 9},
            {"stop_token_ids": (3, 4)}, {"frequency_penalty": 0.7}, {"logprobs": {"return_logprob": True}},
            {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"max_new_tokens": 3},
            {"min_new_tokens": 9, "stop_token_ids": (3, 4, 5)}, {"max_new_tokens": 0},
            {"temperature": 1.0, "seed": 7, "stop_token_ids": (1, 2, 3)},
            {"logprobs": {"return_logprob": True, "logprob_start_len": 0}}]


def answers(checkpoint, count=26, **options):
    """Tokens and finishes of ``count`` requests, some of which share prefixes."""
    engine = Engine(checkpoint, **options)
    start_all(engine, sharing_prompts(count, VOCAB), REQUESTS)
    outputs = engine.run()
    return engine, tokens_of(outputs), finishes_of(outputs)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return answers(checkpoint)[1:]


MIXED = {"schedule": {"enable_mixed_chunk": True}}


@pytest.mark.parametrize("options", [
    {}, {"overlap": True}, {"page_size": 1, "chunk": 7}, {"page_size": 16, "chunk": 7, "overlap": True},
    {"max_total_tokens": 128, "chunk": 20}, {"max_total_tokens": 96, "page_size": 1, "max_drafts": 9},
    {"radix": False, "max_running": 3}, {"chunk": 9, **MIXED}, {"chunk": 20, "max_total_tokens": 128, **MIXED},
    {"max_drafts": 1}, {"max_running": 4, "overlap": True}, {"max_running": 4, "shifted": True},
    {"shifted": True, "max_total_tokens": 128, "overlap": True}, {"chunk": 9, "overlap": True, **MIXED},
    {"shifted": True}, {"shifted": True, "max_total_tokens": 128, "chunk": 9, **MIXED}], ids=str)
def test_tokens_equal_those_without_drafts(checkpoint, expected, options):
    options = dict(options)
    drafter = TableDrafter(expected[0], VOCAB, options.get("page_size", 4), shifted=options.pop("shifted", False))
    engine, *found = answers(checkpoint, drafter=drafter, **options)
    assert tuple(found) == expected
    assert (engine.scheduler.batcher.retraction.num_retracted > 0) == ("max_total_tokens" in options)
    assert 0 < engine.drafting.num_accepted < engine.drafting.num_drafted <= drafter.num_drafted
    if "schedule" in options:
        assert (True, True, True) in drafter.kinds


def test_pauses_and_aborts(checkpoint, expected):
    """Requests whose pages are freed between steps are computed again, and the drafter is shown all of their rows."""
    drafter = TableDrafter(expected[0], VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter, overlap=True)
    reqs = start_all(engine, sharing_prompts(4, VOCAB), REQUESTS)
    scheduler, batcher = engine.scheduler, engine.scheduler.batcher
    for _ in range(4):
        scheduler.step(0.0)
    assert scheduler._pipeline.in_flight is not None
    scheduler.synchronize()
    assert any(req.drafts for req in reqs)
    batcher.pause("retract")
    assert engine.cache.num_allocated == 0
    assert not scheduler.step(0.0)
    batcher.paused = None
    for _ in range(4):
        scheduler.step(0.0)
    scheduler.synchronize()
    engine.tracker.drop(reqs[1])
    scheduler.abort(reqs[1], None)
    found = tokens_of(engine.run())
    assert {rid: found[rid] for rid in "023"} == {rid: expected[0][rid] for rid in "023"}
    assert found["1"] == expected[0]["1"][:len(found["1"])]
