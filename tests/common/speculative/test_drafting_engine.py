"""Speculative decoding through the whole engine: equal tokens, whatever is drafted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from baton.common.api.drafts import Drafts
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.scheduler.drafting import _within
from baton.common.speculative.ngram import NgramProposer
from baton.tests.helpers.hand_driven import Engine, finishes_of, start_all, tokens_of
from baton.tests.helpers.toy_proposer import RepeatLastTokens

VOCAB = 24


class Oracle:
    """Knows the answers, and errs now and then: its drafts end within runs, at ends, and not at all."""

    def __init__(self, answers):
        self.answers, self.calls, self.accepted, self.ended = answers, itertools.count(), [], []

    def propose(self, reqs, limits):
        found = []
        for req, limit in zip(reqs, limits):
            number = next(self.calls)
            known = req.tokens.count - req.num_prompt_tokens
            drafts = (self.answers[req.rid][known:] + [1] * limit)[:number % (limit + 1)]
            if drafts and number % 3 == 0:
                drafts[number % len(drafts)] = (drafts[number % len(drafts)] + 1) % VOCAB
            found.append(Drafts(tuple(drafts)) if drafts else None)
        return found

    def on_verified(self, req, drafts, num_accepted):
        self.accepted.append(num_accepted)

    def on_end(self, reqs):
        self.ended += [req.rid for req in reqs]


REQUESTS = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 9},
            {"stop_token_ids": (3, 4)}, {"frequency_penalty": 0.7}, {"logprobs": {"return_logprob": True}},
            {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"min_new_tokens": 9, "stop_token_ids": (3, 4, 5)},
            {"temperature": 1.0, "seed": 7, "stop_token_ids": (1, 2, 3)}]


def answers(checkpoint, **options):
    engine = Engine(checkpoint, **options)
    rng = np.random.default_rng(0)
    start_all(engine, [rng.integers(0, VOCAB, int(rng.integers(1, 50))).tolist() for _ in range(20)], REQUESTS)
    outputs = engine.run()
    logprobs = {item.rid: 0 for item in outputs}
    for item in outputs:
        logprobs[item.rid] += len(item.logprobs.values) if item.logprobs else 0
    return engine, (tokens_of(outputs), finishes_of(outputs), logprobs)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return answers(checkpoint)[1]


@pytest.mark.parametrize("options", [
    {}, {"overlap": True}, {"page_size": 1, "chunk": 7}, {"page_size": 16, "overlap": True, "chunk": 7},
    {"max_total_tokens": 128, "chunk": 20}, {"max_total_tokens": 128, "overlap": True, "max_drafts": 9},
    {"radix": False, "max_running": 3}, {"chunk": 9, "schedule": {"enable_mixed_chunk": True}},
    {"chunk": 9, "overlap": True, "schedule": {"enable_mixed_chunk": True}}], ids=str)
def test_tokens_equal_those_without_drafts(checkpoint, expected, options):
    for proposer in (Oracle(expected[0]), RepeatLastTokens(), NgramProposer(SpeculativeArgs())):
        engine, found = answers(checkpoint, proposer=proposer, **options)
        assert found == expected
        if "max_total_tokens" in options:
            assert engine.scheduler.batcher.retraction.num_retracted > 0
        assert engine.drafting.num_accepted > 0
        if isinstance(proposer, Oracle):
            assert set(proposer.accepted) >= {0, 1, 2, 3}
            assert sorted(proposer.ended, key=int) == sorted(expected[0], key=int)


def test_steps_without_drafts_overlap(checkpoint, expected):
    """Drafts come and go: only steps that have some wait for the one before."""
    class Sometimes(Oracle):
        def propose(self, reqs, limits):
            drafts = reqs and reqs[0].num_output_tokens % 8 in (7, 0)
            return super().propose(reqs, limits) if drafts else [None] * len(reqs)

    engine = Engine(checkpoint, proposer=Sometimes(expected[0]), overlap=True)
    rng = np.random.default_rng(0)
    engine.start("0", rng.integers(0, VOCAB, int(rng.integers(1, 50))).tolist(), max_new_tokens=30)
    in_flight = []
    while engine.scheduler.step(0.0):
        engine.tracker.flush()
        in_flight.append(engine.scheduler._pipeline.in_flight is not None)
    tokens = tokens_of([row for message in engine.sent for row in message.rows()])
    assert tokens == {"0": expected[0]["0"]}
    assert engine.drafting.num_steps > 0 and sum(in_flight) > 10 and not all(in_flight[:-1])


def test_an_aborted_request_ends_its_drafting(checkpoint, expected):
    proposer = RepeatLastTokens()
    engine = Engine(checkpoint, proposer=proposer)
    req = engine.start("0", [1, 2, 3], max_new_tokens=30)
    for _ in range(5):
        engine.scheduler.step(0.0)
    engine.scheduler.synchronize()
    engine.scheduler.abort(req, None)
    assert proposer.ended == ["0"] and engine.cache.num_allocated == 0


def test_a_step_has_a_limit_of_tokens(checkpoint, expected):
    """Buffers are made for so many: the first requests get drafts, the others none."""
    engine = Engine(checkpoint, proposer=RepeatLastTokens(), max_drafts=4)
    engine.drafting._max_step_tokens = 13
    sizes, launch = [], engine.executor.launch
    engine.executor.launch = lambda step, *rest: (sizes.append((step.num_tokens, len(step), step.num_prefill)),
                                                  launch(step, *rest))[1]
    for i in range(8):
        engine.start(str(i), [i + 1, 2, 3], max_new_tokens=12)
    engine.run()
    decoded = [(tokens, rows) for tokens, rows, prompts in sizes if not prompts]
    assert (13, 8) in decoded and max(tokens for tokens, _ in decoded) == 13


def test_too_many_drafts_are_cut_alike():
    for total in range(20):
        cut = _within(np.array([3, 0, 5, 5, 1]), total)
        assert cut.sum() == min(total, 14) and (cut <= [3, 0, 5, 5, 1]).all()
    assert _within(np.array([3, 0, 5, 5, 1]), 10).tolist() == [3, 0, 3, 3, 1]
    assert _within(np.array([3, 0, 5, 5, 1]), 8).tolist() == [3, 0, 2, 2, 1]
