"""Answers by grammars, in an engine of the shipped chat model: where they end, and that nothing changes them."""

from __future__ import annotations

import json
import re
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from baton.common.api.errors import from_code
from baton.common.api.grammar import GrammarSpec, Vocabulary
from baton.common.api.messages import Failed
from baton.common.api.sampling import SamplingParams
from baton.common.config.server.answers import GRAMMAR_BACKENDS
from baton.common.grammar.masks import MaskFiller
from baton.common.grammar.matcher import Matcher
from baton.common.request.token_buffer import TokenBuffer
from baton.tests.helpers.grammar_engine import GrammarEngine, schema_spec, text_of, tokenizer
from baton.tests.helpers.outputs import outputs_of

PERSON = schema_spec({
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "minItems": 1, "maxItems": 3}},
    "required": ["name", "age", "tags"], "additionalProperties": False})
WORDS = GrammarSpec("regex", "(ab|cd|ef){2,40}")
COLOURS = GrammarSpec("ebnf", 'root ::= colour (", " colour)*\ncolour ::= "red" | "green" | "blue"')
TAGGED = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": "<n>",
                     "content": {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}},
                                                                                         "end": "</n>"}}))


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request) -> str:
    return request.param


def answer(backend: str, grammar: GrammarSpec | None, **options) -> tuple[str, str, list[int]]:
    """Text, finish reason and tokens of a lone request."""
    engine = GrammarEngine(whitespace="[ ]?", overlap=options.pop("overlap", False),
                           backend=backend)
    engine.start("a", grammar, **options)
    tokens = engine.run()["a"]
    assert isinstance(tokens, list), tokens
    return text_of(tokens), engine.reasons["a"], tokens


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("grammar", "matches"), [
    (PERSON, lambda text: set(json.loads(text)) == {"name", "age", "tags"}),
    (WORDS, lambda text: not text.replace("ab", "").replace("cd", "").replace("ef", "")),
    (COLOURS, lambda text: set(text.split(", ")) <= {"red", "green", "blue"}),
    (TAGGED, lambda text: text[:3] == "<n>" and text[3].isdigit() and text[4:] == "</n>"),
], ids=["json_schema", "regex", "ebnf", "structural_tag"])
def test_answers_obey_their_grammar(grammar, matches, options, backend):
    text, reason, tokens = answer(backend, grammar, max_new_tokens=300, **options)
    if reason == "stop":
        assert tokens[-1] in tokenizer().special_ids and matches(text), text
    else:  # a repetition without end
        assert grammar is COLOURS and set(text.split(", ")[:-1]) <= {"red", "green", "blue"}


def test_an_answer_ends_where_it_must(backend):
    assert answer(backend, GrammarSpec("regex", "yes"))[:2] == ("yes", "stop")
    assert answer(backend, GrammarSpec("regex", "yes"), ignore_eos=True)[:2] == ("yes", "stop")
    assert answer(backend, GrammarSpec("regex", "yes"), min_new_tokens=20)[:2] == ("yes", "stop")
    assert answer(backend, GrammarSpec("regex", "yes"), logit_bias={2: -100.0})[:2] == ("yes", "stop")
    text, reason, tokens = answer(backend, GrammarSpec("regex", "[0-9]*"), max_new_tokens=7, ignore_eos=True)
    assert (len(text), reason, len(tokens)) == (len(text), "length", 7) and text.isdigit()


def test_an_answer_may_go_on_until_it_wants_to_end(backend):
    text, reason, _ = answer(backend, GrammarSpec("regex", "(Paris)?[ x]*"), min_new_tokens=9, max_new_tokens=40)
    assert len(text) >= 9
    assert answer(backend, GrammarSpec("regex", "(Paris)?[ x]*"))[:2] == ("Paris", "stop")


def test_length_cuts_inside(backend):
    text, reason, _ = answer(backend, PERSON, max_new_tokens=5)
    assert reason == "length" and text.startswith("{")
    with pytest.raises(ValueError):
        json.loads(text)


def test_the_mask_wins_over_bias_and_penalties(backend):
    everything = dict.fromkeys(tokenizer().encode("Hello there, my dear friend", add_special_tokens=False), 100.0)
    text, reason, _ = answer(backend, PERSON, logit_bias=everything, frequency_penalty=2.0, presence_penalty=2.0,
                             repetition_penalty=2.0)
    assert reason == "stop" and set(json.loads(text)) == {"name", "age", "tags"}


def test_stop_tokens_count_only_where_the_grammar_may_end(backend):
    first = answer(backend, WORDS)[2][0]
    text, reason, tokens = answer(backend, WORDS, stop_token_ids=(first,), min_new_tokens=5)
    assert tokens[0] != first and first not in tokens[:-1] and reason == "stop"
    assert re.fullmatch(WORDS.text, text.removesuffix(tokenizer().token_bytes(first).decode())), text


def test_a_stop_token_that_the_grammar_needs_is_an_error(backend):
    engine = GrammarEngine(backend=backend)
    all_x = [token for token in range(4096) if (piece := tokenizer().token_bytes(token)) and not piece.strip(b"x")]
    engine.start("a", GrammarSpec("regex", "x{5}"), stop_token_ids=tuple(all_x))
    found = engine.run()["a"]
    assert isinstance(found, Failed) and "No token" in found.message


def test_special_tokens_are_no_text(backend):
    """A model that would rather say a special token inside a string is not let."""
    specials = dict.fromkeys(tokenizer().special_ids, 100.0)
    text, reason, tokens = answer(backend, GrammarSpec("json_schema", '{"type":"string","minLength":4,"maxLength":6}'),
                                  logit_bias=specials)
    assert not tokenizer().special_ids & set(tokens[:-1]) and 4 <= len(json.loads(text)) <= 6


@pytest.mark.parametrize("whitespace", [None, ""])
def test_structural_tags_may_name_special_tokens(whitespace, backend):
    """Markup is often a token of its own; spelled out letter by letter it would be another text to the model."""
    [special] = tokenizer().encode("<|im_start|>", add_special_tokens=False)
    assert special in tokenizer().special_ids
    boolean = {"type": "json_schema", "json_schema": {"type": "boolean"}}
    engine = GrammarEngine(backend=backend, whitespace=whitespace)
    for rid, begin in (("text", {"type": "const_string", "value": "<|im_start|>"}),
                       ("name", {"type": "token", "token": "<|im_start|>"})):
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [begin, boolean]}}
        engine.start(rid, GrammarSpec("structural_tag", json.dumps(tag)), logit_bias={special: 100.0})
    for tokens in engine.run().values():
        assert tokens[0] == special and text_of(tokens) in ("true", "false")


REQUESTS = [(PERSON, {}), (WORDS, {"temperature": 1.0, "seed": 3}), (None, {}), (COLOURS, {"max_new_tokens": 30}),
            (TAGGED, {"temperature": 0.7, "seed": 4}), (None, {"temperature": 1.0, "seed": 8}),
            (PERSON, {"temperature": 1.0, "seed": 1}), (PERSON, {"max_new_tokens": 6}), (WORDS, {"min_new_tokens": 30}),
            (GrammarSpec("regex", "no"), {"max_new_tokens": 1})]


def together(backend: str, **engine_options) -> dict:
    engine = GrammarEngine(backend=backend, whitespace="", **engine_options)
    for i, (grammar, options) in enumerate(REQUESTS):
        engine.start(str(i), grammar, f"What is {i} plus {i}?", **{"max_new_tokens": 60} | options)
    found = engine.run()
    return {rid: (tokens, engine.reasons[rid]) for rid, tokens in found.items()} | {
        "retracted": engine.scheduler.batcher.retraction.num_retracted > 0}


@pytest.fixture(scope="module")
def expected(backend):
    return together(backend)


@pytest.mark.parametrize("options", [{"overlap": True}, {"chunk": 16}, {"chunk": 16, "overlap": True},
                                     {"max_running": 2, "overlap": True}],
                         ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_tokens_do_not_depend_on_the_schedule(expected, options, backend):
    assert together(backend, **options) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_keeps_the_place_in_the_grammar(expected, overlap, backend):
    assert together(backend, max_total_tokens=160, overlap=overlap) == expected | {"retracted": True}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_an_answer_goes_on_elsewhere(options, overlap, backend):
    """The tokens that another server has told come behind the prompt, and the grammar goes on behind them."""
    engine = GrammarEngine(backend=backend, whitespace="", overlap=overlap)
    engine.start("whole", PERSON, **options)
    whole = engine.run()["whole"]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        engine.start(f"{cut}", PERSON, answered=tuple(whole[:cut]), **options)
    assert engine.run() == {str(cut): whole[cut:] for cut in (1, len(whole) // 2, len(whole) - 1)}


def test_told_tokens_that_break_the_grammar_fail_the_request(backend):
    engine = GrammarEngine(backend=backend)
    engine.start("a", PERSON, answered=tuple(tokenizer().encode("Once upon", add_special_tokens=False)))
    engine.start("b", PERSON, answered=(2,))
    engine.start("c", GrammarSpec("regex", "yes"))
    engine.start("d", GrammarSpec("regex", "a*"), answered=(2,))  # the grammar may end there, and the answer has not
    found = engine.run()
    for rid in "abd":
        assert isinstance(found[rid], Failed) and "does not follow the grammar" in found[rid].message
        assert from_code(found[rid].code, found[rid].message).status == 400
    assert text_of(found["c"]) == "yes"


def allowed_first(backend: str, grammar: GrammarSpec, pieces: list[bytes]) -> tuple[set[int], Matcher]:
    """Token ids that may begin an answer, in a vocabulary whose token 2 ends it."""
    library = GRAMMAR_BACKENDS.get(backend)
    compiled = library.compiler(Vocabulary(pieces, [2], [2]), None).compile(grammar)
    ends = frozenset([2])
    matcher = Matcher(partial(library.state, compiled), TokenBuffer([7, 7]), 2, ends, ends,
                      SamplingParams(grammar=grammar))
    matcher.advance()
    mask = torch.full((1, -(len(pieces) // -32)), -1, dtype=torch.int32)
    [fill] = MaskFiller(len(pieces), library.fill_together).fill([matcher])
    fill(mask, 0)
    return set(np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))), matcher


@pytest.mark.parametrize("size", [64, 70, 95, 96])
def test_ids_without_a_token_are_never_allowed(size, backend):
    """Models have more rows of logits than their tokenizer has tokens."""
    pieces = [b"a", b"b", b"<end>", b"ab", "é".encode(), b"\xc3"] + [b""] * (size - 6)
    assert allowed_first(backend, GrammarSpec("regex", "[ab]+"), pieces)[0] == {0, 1, 3}
    assert allowed_first(backend, GrammarSpec("regex", ".*"), pieces)[0] == {0, 1, 2, 3, 4, 5}
    assert allowed_first(backend, GrammarSpec("regex", "é?"), pieces)[0] == {2, 4, 5}
    found, matcher = allowed_first(backend, GrammarSpec("regex", "c"), pieces)
    assert found == {2} and matcher.error is not None and "No token" in matcher.error.message


def test_a_grammar_that_nobody_prepared_fails_its_request_alone(backend):
    engine = GrammarEngine(backend=backend)
    engine.start("bad", GrammarSpec("regex", "(x"))
    engine.start("good", GrammarSpec("regex", "fine"))
    found = engine.run()
    assert isinstance(found["bad"], Failed) and "regex" in found["bad"].message
    assert text_of(found["good"]) == "fine"


def test_a_grammar_without_end_runs_to_the_length(backend):
    engine = GrammarEngine(backend=backend)
    engine.start("a", GrammarSpec("ebnf", 'root ::= "a" root'), max_new_tokens=8)
    assert set(text_of(engine.run()["a"])) == {"a"} and engine.reasons["a"] == "length"


def test_an_ambiguous_grammar_pays_for_itself(monkeypatch):
    """Following it takes ever longer; the others must not wait for ever."""
    from baton.common.grammar import masks, matcher

    monkeypatch.setattr(matcher, "_BUDGET_SECONDS", 0.05)
    monkeypatch.setattr(matcher, "_BUDGET_SECONDS_PER_TOKEN", 0.001)
    monkeypatch.setattr(masks, "_SLOW_BATCH_SECONDS", 0.002)
    a_only = {"logit_bias": {token: 100.0 for token in range(4096) if tokenizer().token_bytes(token) == b"a"}}
    engine = GrammarEngine(whitespace="")
    engine.start("accepting", GrammarSpec("ebnf", 'root ::= root root | "a"'), **a_only)
    engine.start("filling", GrammarSpec("regex", "((a{1,300}){1,300}){1,300}"), **a_only)
    engine.start("innocent", PERSON)
    found = engine.run()
    for rid in ("accepting", "filling"):
        assert isinstance(found[rid], Failed) and "too ambiguous" in found[rid].message, found[rid]
    assert json.loads(text_of(found["innocent"]))["tags"]


@pytest.mark.parametrize("method", ["fill_next_token_bitmask", "accept_token"])
@pytest.mark.parametrize("beside", [None, WORDS], ids=["alone", "in a batch"])
def test_a_failure_inside_xgrammar_ends_its_request_alone(method, beside):
    class Broken:
        """A matcher of xgrammar that throws what xgrammar throws for its own mistakes."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            if name == method:
                raise RuntimeError("internal check failed")
            return getattr(self.inner, name)

    def batch(self, grammars, words, rows):
        if any(isinstance(grammar, Broken) for grammar in grammars):
            raise RuntimeError("internal check failed")
        for grammar, row in zip(grammars, rows):
            grammar.fill_next_token_bitmask(words, row)

    engine = GrammarEngine()
    with patch("xgrammar.BatchGrammarMatcher.batch_fill_next_token_bitmask", batch), \
            patch("xgrammar.GrammarMatcher", side_effect=broken_first(Broken)):
        engine.start("broken", PERSON, max_new_tokens=20)
        if beside:
            engine.start("innocent", beside, max_new_tokens=20)
        found = engine.run()
    assert isinstance(found["broken"], Failed) and "could not be followed" in found["broken"].message
    assert beside is None or set(text_of(found["innocent"])) <= set("abcdef")


def broken_first(wrap):
    """Makes matchers, the first of them wrapped."""
    import xgrammar

    real, made = xgrammar.GrammarMatcher, []

    def make(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return wrap(made[-1]) if len(made) == 1 else made[-1]

    return make


def test_logprobs_are_those_of_what_the_grammar_allows():
    from baton.common.api.messages import Generate

    engine = GrammarEngine()
    params = SamplingParams(temperature=0.0, max_new_tokens=4, grammar=GrammarSpec("regex", "yes"))
    req = engine.tracker.accept(Generate("a", [5, 6, 7], params, return_logprob=True, top_logprobs_num=2), now=0.0)
    req.matcher = engine.store.matcher(req, 3)
    engine.scheduler.add(req)
    while engine.scheduler.step(0.0):
        engine.tracker.flush()
    engine.tracker.flush()
    values = [value for output in outputs_of(engine.sent) for value in output.logprobs.values]
    assert all(-20 < value <= 0 for value in values) and values[-1] == pytest.approx(0, abs=1e-6), values
