"""Steps without drafts, while drafts do not pay: what drafts after them is accepted as often, and pages are reused."""

from __future__ import annotations

import pytest

from baton.common.config.server import SpeculativeArgs
from baton.common.speculative.draft_length import DraftLength
from baton.common.tinychat import CHECKPOINT, DRAFT_MODELS
from baton.tests.common.runner.test_chain_graphs import HEADS, prompts
from baton.tests.common.speculative.test_adaptive_engine import DEAR, FREE
from baton.tests.helpers.hand_driven import Engine

COUNT = 6
CHAINS = {count: [2, COUNT] for count in (0, 1, 3)}


def engine_of(algorithm, chains, **options):
    return Engine(CHECKPOINT, speculative=SpeculativeArgs(
        speculative_algorithm=algorithm, speculative_draft_model_path=str(DRAFT_MODELS[HEADS[algorithm]]),
        speculative_num_steps=3, speculative_adaptive=True), max_drafts=3, chains=chains, **options)


def adapt(engine, costs):
    lengths = DraftLength(costs, 3)
    if costs is DEAR:
        lengths.num_drafts = 0
    engine.drafting.adapt(lengths)


def answer(engine, reqs):
    """Finishes requests; returns the answer of each, and what it had of the prefix cache and its drafts."""
    outputs = engine.run()
    reports = {item.rid: item.speculation for item in outputs if item.finish is not None}
    answers = [req.tokens.view(req.num_prompt_tokens).tolist() for req in reqs]
    return answers, [(req.num_cached_tokens, reports[req.rid].num_drafts, reports[req.rid].num_accepted)
                     for req in reqs]


def start(engine, texts, counts):
    return [engine.start(str(number), text, max_new_tokens=count, ignore_eos=True)
            for number, (text, count) in enumerate(zip(texts, counts))]


@pytest.mark.parametrize("chains", [None, CHAINS], ids=["eager", "chains"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN"])
def test_the_next_turn_after_plain_steps_is_drafted_as_after_others(algorithm, chains):
    turns = []
    for costs in (DEAR, FREE):
        engine = engine_of(algorithm, chains, overlap=True)
        texts = prompts(COUNT)
        adapt(engine, costs)
        answers, first = answer(engine, start(engine, texts, [24] * COUNT))
        assert (sum(num_drafts for _, num_drafts, _ in first) > 0) is (costs is FREE)
        assert not engine.cache.has_draft_gaps
        adapt(engine, FREE)
        texts = [[*text, *tokens, 7] for text, tokens in zip(texts, answers)]
        turns.append(answer(engine, start(engine, texts, [24] * COUNT)))
        assert all(cached >= len(text) - 8 for text, (cached, _, _) in zip(texts, turns[-1][1]))
    assert turns[0] == turns[1]
    assert sum(accepted for _, _, accepted in turns[0][1]) > 30


@pytest.mark.parametrize("chains", [None, CHAINS], ids=["eager", "chains"])
def test_requests_draft_again_once_drafts_pay(chains):
    """As many drafts are accepted as of the same text where its beginning is a prompt."""
    engine, texts = engine_of("EAGLE3", chains, overlap=True), prompts(COUNT)
    adapt(engine, DEAR)
    reqs = start(engine, texts, [60] * COUNT)
    for _ in range(15):
        engine.scheduler.step(0.0)
    engine.scheduler.synchronize()
    begun = [req.tokens.view(req.num_prompt_tokens).tolist() for req in reqs]
    assert engine.drafting.num_drafted == 0 and min(map(len, begun)) > 10
    adapt(engine, FREE)
    answers, reports = answer(engine, reqs)
    engine = engine_of("EAGLE3", chains, overlap=True)
    adapt(engine, FREE)
    reqs = start(engine, [[*text, *tokens] for text, tokens in zip(texts, begun)], [60 - len(each) for each in begun])
    rest, steady = answer(engine, reqs)
    assert answers == [[*tokens, *after] for tokens, after in zip(begun, rest)]
    assert [report[1:] for report in reports] == [report[1:] for report in steady]
    assert sum(accepted for _, _, accepted in steady) > 60
