"""Requests with extras through the whole engine: tokens, log-probabilities, hidden states and failures equal those of
plain decoding, whatever is drafted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from baton.common.api.grammar import GrammarSpec, Vocabulary
from baton.common.api.messages import CustomProcessor, Failed
from baton.common.config.server import SpeculativeArgs
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.oracle import Oracle
from baton.tests.helpers.outputs import outputs_of
from baton.tests.helpers.small_models import save_steep_qwen3

PIECES = [b"<end>", b"{", b"}", b'"', b":", b",", b"[", b"]", b"a", b"b", b"c", b"ab", b"0", b"1", b"2", b"12", b" ",
          b"true", b"false", b'{"', b'":', b"x", b"</t>", b"cc"]
VOCAB, EOS = len(PIECES), 0
NUM_REQUESTS = 240
GRAMMARS = [
    GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {
        "a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
        "required": ["a", "b"], "additionalProperties": False})),
    GrammarSpec("regex", "(ab|c){2,5}x"),  # completes in the middle of a run
    GrammarSpec("regex", "[abc]*"),  # may end after any token
    GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "regex", "pattern": "[abcx ]{0,9}"}, {"type": "const_string", "value": "</t>"},
        {"type": "json_schema", "json_schema": {"type": "boolean"}}]}})),  # the grammar begins after a marker
]
HELPERS = "baton.tests.helpers.row_processors"


def random_request(rng: np.random.Generator) -> dict[str, Any]:
    """Options of Engine.start."""
    options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 30))}
    fields: dict[str, Any] = {}
    if rng.random() < 0.6:
        options |= {"temperature": float(rng.choice([0.7, 1.0, 1.3])), "seed": int(rng.integers(0, 1000))}
    if rng.random() < 0.3:
        options |= {"top_p": 0.9, "top_k": 9, "min_p": 0.02}
    if rng.random() < 0.4:
        options |= {"frequency_penalty": float(rng.choice([0.0, 0.7, -0.5])), "presence_penalty": 0.4,
                    "repetition_penalty": float(rng.choice([1.0, 1.3, 0.8]))}
    if rng.random() < 0.3:
        options["logit_bias"] = {int(token): float(rng.normal() * 2) for token in rng.integers(0, VOCAB, 3)}
    if rng.random() < 0.3:
        options["min_new_tokens"] = int(rng.integers(0, options["max_new_tokens"] + 1))
    if rng.random() < 0.3:
        options["stop_token_ids"] = tuple(rng.integers(1, VOCAB, 2).tolist())
    if rng.random() < 0.4:
        options["grammar"] = GRAMMARS[int(rng.integers(0, len(GRAMMARS)))]
    elif rng.random() < 0.3:
        options["ignore_eos"] = True
    if rng.random() < 0.4:
        options["logprobs"] = {"return_logprob": True, "top_logprobs_num": int(rng.integers(0, 4)),
                               "token_ids_logprob": rng.integers(0, VOCAB, int(rng.integers(0, 3))).tolist(),
                               "logprob_start_len": int(rng.integers(-1, 3))}
    if rng.random() < 0.3:
        fields["return_hidden_states"] = True
    if rng.random() < 0.3 and "grammar" not in options:
        length = int(rng.integers(0, 40))
        fields["processor"] = (CustomProcessor(f"{HELPERS}:FailsAtLength", {"length": length}) if rng.random() < 0.3
                               else CustomProcessor(f"{HELPERS}:Alternates"))
    return options | {"fields": fields}


class Answer:
    """What a request has reported."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: Any = None
        self.logprobs: list[Any] = []
        self.hidden: list[float] = []
        self.failure: str | None = None


def answers(checkpoint, all_ranks_match=True, **options) -> tuple[Engine, dict[str, Answer]]:
    engine = Engine(checkpoint, vocabulary=Vocabulary(PIECES, [EOS], [EOS]), **options)
    if not all_ranks_match:
        engine.drafting._all_ranks_match = False
    rng = np.random.default_rng(5)
    for number in range(NUM_REQUESTS):
        prompt = rng.integers(1, VOCAB, int(rng.integers(1, 30))).tolist()
        request = random_request(rng)
        if rng.random() < 0.1:
            request["fields"]["input_embeds"] = rng.normal(size=(len(prompt), 64)).astype("<f4").tobytes()
        engine.start(str(number), prompt, **request)
    sent = engine.sent
    while engine.scheduler.step(0.0):
        engine.tracker.flush()
    assert engine.scheduler.idle and not engine.tracker.live and engine.cache.num_allocated == 0
    engine.cache.check_integrity()
    found: dict[str, Answer] = {str(number): Answer() for number in range(NUM_REQUESTS)}
    for message in sent:
        if isinstance(message, Failed):
            found[message.rid].failure = message.message
    for output in outputs_of(sent):
        answer = found[output.rid]
        answer.tokens += output.token_ids
        answer.finish = output.finish or answer.finish
        for logprobs in (output.prompt_logprobs, output.logprobs):
            if logprobs is not None:
                assert logprobs is not output.logprobs or logprobs.token_ids == output.token_ids
                answer.logprobs += zip(logprobs.token_ids, logprobs.values, logprobs.top, logprobs.of_ids)
        if output.hidden_states:
            answer.hidden += np.frombuffer(output.hidden_states, "<f4").tolist()
    return engine, found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_steep_qwen3(folder, seed=1, vocab_size=VOCAB, eos_token_id=EOS)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    found = answers(checkpoint)[1]
    assert sum(answer.failure is not None for answer in found.values()) > 3
    return found


def assert_equal(found: Answer, wanted: Answer) -> None:
    assert (found.failure, found.finish) == (wanted.failure, wanted.finish)
    if wanted.failure is not None:
        return  # tokens before it may have been reported or not
    assert found.tokens == wanted.tokens
    assert len(found.hidden) == len(wanted.hidden) and np.allclose(found.hidden, wanted.hidden, atol=1e-3)
    assert len(found.logprobs) == len(wanted.logprobs)
    for (token, value, top, of_ids), (other, other_value, other_top, other_of_ids) in zip(found.logprobs,
                                                                                          wanted.logprobs):
        assert token == other and (value is None) == (other_value is None)
        assert value is None or value == pytest.approx(other_value, abs=1e-3)
        for pairs, other_pairs in ((top, other_top), (of_ids, other_of_ids)):
            assert [pair[0] for pair in pairs] == [pair[0] for pair in other_pairs]
            assert [pair[1] for pair in pairs] == pytest.approx([pair[1] for pair in other_pairs], abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"max_drafts": 7, "max_total_tokens": 512, "chunk": 20, "overlap": True},
                                     {"all_ranks_match": False}, {"width": 2, "max_drafts": 8},
                                     {"width": 3, "max_drafts": 7, "all_ranks_match": False}], ids=str)
def test_extras_equal_those_without_drafts(checkpoint, expected, options):
    """Without ``all_ranks_match``, as under tensor parallelism, forbidden drafts are computed, and rejected. A
    ``width`` above 1 makes trees."""
    width, options = options.get("width", 1), {name: value for name, value in options.items() if name != "width"}
    oracle = Oracle({rid: answer.tokens for rid, answer in expected.items()}, VOCAB, width=width)
    engine, found = answers(checkpoint, proposer=oracle, **options)
    for rid, wanted in expected.items():
        assert_equal(found[rid], wanted)
    assert ("max_total_tokens" in options) == (engine.scheduler.batcher.retraction.num_retracted > 0)
    assert engine.drafting.num_accepted > 0.4 / width * engine.drafting.num_drafted
    assert set(oracle.accepted) >= {0, 1, 2, 3}


def test_extras_equal_those_without_drafts_in_chain_steps(checkpoint, expected):
    """Chain steps follow each other, wait for requests with extras, and give way to those that want hidden states."""
    args = SpeculativeArgs(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(checkpoint))
    engine, found = answers(checkpoint, speculative=args, chains={3: [3]}, max_running=3, overlap=True)
    for rid, wanted in expected.items():
        assert_equal(found[rid], wanted)
    assert engine.drafting.num_accepted > 1000


def test_parameters_that_cannot_be_copied_get_no_drafts_accepted(checkpoint):
    """Their requests go on token by token; requests beside them are not affected."""
    def tokens(**options):
        engine = Engine(checkpoint, **options)
        for rid, fields in (("locks", {"processor": CustomProcessor(f"{HELPERS}:KeepsLock")}), ("plain", {})):
            engine.start(rid, [3, 4, 5], max_new_tokens=12, ignore_eos=True, fields=fields)
        return tokens_of(engine.run()), engine

    expected, _ = tokens()
    oracle = Oracle(expected, VOCAB, right=1.0)
    found, engine = tokens(proposer=oracle)
    assert found == expected and len(found["locks"]) == 12
    assert engine.drafting.num_accepted == sum(oracle.accepted) > 0 and oracle.accepted.count(0) > 5
