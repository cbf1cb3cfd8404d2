"""Answers by grammars with drafts, a sample of tests/bench/grammar_speculation.py: none is invalid or fails."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.common.api.grammar import GrammarSpec
from baton.common.api.messages import Failed
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.speculative.ngram import NgramProposer
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.grammar_engine import chat_ids, text_of, vocabulary
from baton.tests.helpers.grammar_requests import GrammarRequest
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.outputs import outputs_of

COUNT = 150


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_answers_are_valid(backend):
    engine = Engine(CHECKPOINT, vocabulary=vocabulary(), grammar_backend=backend, page_size=8, max_total_tokens=16384,
                    proposer=NgramProposer(SpeculativeArgs()))
    requests = {str(number): GrammarRequest.draw(number) for number in range(COUNT)}
    for rid, request in requests.items():
        sampling = {"temperature": 0.0, **request.sampling}
        engine.start(rid, chat_ids(request.question), grammar=GrammarSpec(*request.grammar), **sampling,
                     **({"seed": int(rid)} if sampling["temperature"] else {}))
    while engine.scheduler.step(0.0):
        engine.tracker.flush()
    assert not [message for message in engine.sent if isinstance(message, Failed)]
    outputs = outputs_of(engine.sent)
    texts = {rid: text_of(tokens) for rid, tokens in tokens_of(outputs).items() if rid}
    reasons = {output.rid: output.finish.reason for output in outputs if output.finish is not None}
    whole = [rid for rid, reason in reasons.items() if reason == "stop"]
    assert not [(requests[rid].grammar, texts[rid]) for rid in whole if not requests[rid].is_valid(texts[rid])]
    assert len(reasons) == COUNT and Counter(reasons.values())["stop"] > COUNT / 2
    assert engine.drafting.num_accepted > 200
