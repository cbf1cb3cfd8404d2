"""A draft model that computes prompts which came from elsewhere: in chunks, between steps of decoding requests."""

from __future__ import annotations

import pytest

from baton.common.engine.draft_prefill import DraftPrefill
from baton.tests.common.speculative.test_device_drafts import VOCAB
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.table_drafter import TableDrafter

CHUNK = 16
PROMPTS = {f"r{number}": [1 + number, *range(2, 2 + length)] for number, length in enumerate((60, 5, 3, 41))}
PROMPTS = {rid: [token % VOCAB for token in prompt] for rid, prompt in PROMPTS.items()}


class Recording(TableDrafter):
    """Records the rows of steps that it computes alone, between the model's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = [[]]

    def run(self, step):
        if step.features is None and step.step.num_prefill:
            self.rows[-1].append(len(step.next_ids))
        return super().run(step)


def start_all(engine):
    return {rid: engine.start(rid, prompt, max_new_tokens=40) for rid, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def expected(checkpoint):
    engine = Engine(checkpoint)
    start_all(engine)
    return tokens_of(engine.run())


def without_draft_pages(engine, drafter, chunk=CHUNK):
    """Starts all requests, and forgets what the draft model has of them: their pages came from elsewhere."""
    scheduler = engine.scheduler
    reqs = start_all(engine)
    while not all(req.num_output_tokens for req in reqs.values()):
        scheduler.step(0.0)
        scheduler.synchronize()
    drafter.slots.clear()
    drafter.rows = [[]]
    scheduler._draft_prefill = DraftPrefill(scheduler.batcher, engine.executor, chunk)
    for req in reqs.values():
        req.drafts = None
        scheduler.draft_prompt(req, 0)
    return reqs


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"chunk": 7}, {"radix": False}])
def test_prompts_are_computed_in_chunks_between_steps_and_then_drafts_follow(checkpoint, expected, options):
    drafter = Recording(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter, **options)
    reqs = without_draft_pages(engine, drafter)
    gaps = {rid for rid, req in reqs.items() if req.draft_gap}
    assert "r0" in gaps
    while gaps:  # all decode meanwhile
        drafter.rows.append([])
        before = {rid: req.length for rid, req in reqs.items()}
        engine.scheduler.step(0.0)
        assert all(req.length > before[rid] for rid, req in reqs.items())
        gaps = {rid for rid in gaps if reqs[rid].draft_gap}
    computed = [sum(rows) for rows in drafter.rows]
    assert 0 < max(computed) <= CHUNK and sum(computed) >= sum(map(len, PROMPTS.values()))
    drafted = engine.drafting.num_drafted
    assert tokens_of(engine.run()) == expected  # TableDrafter has checked every slot of who drafts
    assert engine.drafting.num_drafted > drafted


def test_pages_of_a_prompt_claim_no_draft_before_it_is_computed(checkpoint, expected):
    drafter = Recording(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter)
    reqs = without_draft_pages(engine, drafter)
    prompt = [*PROMPTS["r0"], 1, 2, 3]
    table = engine.cache.match_prefix(reqs["r0"].tokens.view(), len(prompt))
    assert table.count and table.draft_gap == 0
    engine.cache.release(table)
    tokens = tokens_of(engine.run())
    assert tokens == expected


def test_a_request_that_ends_or_is_retracted_leaves_no_work(checkpoint, expected):
    drafter = Recording(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter)
    reqs = without_draft_pages(engine, drafter, 4)
    engine.scheduler.synchronize()
    gone = reqs.pop("r0")
    engine.scheduler.abort(gone, None)
    engine.tracker.drop(gone)
    engine.scheduler.batcher.pause("retract")
    engine.scheduler.batcher.paused = None
    found = tokens_of(engine.run())
    assert {rid: found[rid] for rid in reqs} == {rid: expected[rid] for rid in reqs}
    assert not engine.scheduler._draft_prefill.due
