"""Matchers that follow drafts: masks and states are those of a matcher that has got the drafts as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from baton.common.api.drafts import Drafts
from baton.common.api.grammar import GrammarSpec, Vocabulary
from baton.common.api.sampling import SamplingParams
from baton.common.config.server.answers import GRAMMAR_BACKENDS
from baton.common.grammar.backend import GrammarState
from baton.common.grammar.masks import MaskFiller
from baton.common.grammar.matcher import Matcher
from baton.common.request.token_buffer import TokenBuffer
from baton.tests.helpers.grammar_engine import schema_spec
from baton.tests.helpers.random_drafts import random_chain, random_tree

PIECES = [chr(code).encode() for code in range(32, 127)] + [b'{"', b'": ', b'", "', b'"}', b"ab", b"cd", b"true", b"12",
                                                            b"<end>", b"<stop>"]
END, STOP = len(PIECES) - 2, len(PIECES) - 1
VOCABULARY = Vocabulary(PIECES, [END, STOP], [END])
GRAMMARS = {
    "object": schema_spec({"type": "object", "properties": {"a": {"type": "string", "maxLength": 4},
                                                            "b": {"type": "boolean"}},
                           "required": ["a", "b"], "additionalProperties": False}),
    "words": GrammarSpec("regex", "(ab|cd){2,9}"),
    "letters": GrammarSpec("regex", "[a-d]*"),
    "nested": GrammarSpec("ebnf", 'root ::= "[" (root ("," root)*)? "]" | [0-9]+'),
    "tagged": GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "sequence",
                          "elements": [{"type": "regex", "pattern": "[a-z ]{0,9}"}, {"type": "const_string",
                                                                                     "value": "</think>"},
                                       {"type": "json_schema", "json_schema": {"enum": ["ab", "cd"]}}]}})),
}


Begin = Callable[[], GrammarState]


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request):
    return GRAMMAR_BACKENDS.get(request.param)


@pytest.fixture(scope="module")
def compiled(backend) -> dict[str, Begin]:
    """The beginnings of the grammars."""
    return {name: begin_of(backend, spec) for name, spec in GRAMMARS.items()}


def begin_of(backend, spec: GrammarSpec, vocabulary: Vocabulary = VOCABULARY) -> Begin:
    return partial(backend.state, backend.compiler(vocabulary, "").compile(spec))


def backend_of(matcher: Matcher):
    """The backend of a matcher, by the module of its state's class."""
    state = getattr(matcher.grammar, "_grammar", matcher.grammar)  # within Broken
    return GRAMMAR_BACKENDS.get("xgrammar" if type(state).__module__.startswith("xgrammar") else "llguidance")


def matcher_of(compiled, tokens: list[int] | TokenBuffer, **sampling) -> Matcher:
    buffer = tokens if isinstance(tokens, TokenBuffer) else TokenBuffer([0, *tokens])
    matcher = Matcher(compiled, buffer, 1, frozenset((END, STOP)), frozenset((END,)), SamplingParams(**sampling))
    assert matcher.advance()
    return matcher


def mask_of(matcher: Matcher) -> list[int] | None:
    """The tokens that may come next."""
    [fill] = MaskFiller(len(PIECES), backend_of(matcher).fill_together).fill([matcher])
    if fill is None:
        return None
    words = torch.full((1, -(len(PIECES) // -32)), -1, dtype=torch.int32)
    fill(words, 0)
    return np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little")).tolist()


def state_of(matcher: Matcher) -> tuple[object, ...]:
    """Where the library shows no state of its own, masks tell states apart."""
    assert matcher.grammar is not None
    shown = getattr(matcher.grammar, "_debug_print_internal_state", lambda: None)()
    return shown, len(matcher), matcher.error, matcher.grammar.is_completed()


def likely_drafts(rng: np.random.Generator, compiled, tokens: list[int], **sampling) -> Drafts:
    """Drafts, chains and trees, most of which the grammar allows."""
    drafts = (random_chain if rng.random() < 0.5 else random_tree)(rng, int(rng.integers(1, 7)), len(PIECES))
    parents = drafts.parents or tuple(range(-1, len(drafts) - 1))
    chosen: list[int] = []
    for index, parent in enumerate(parents):
        siblings = {chosen[other] for other in range(index) if parents[other] == parent}
        path = Drafts(tuple(chosen), parents[:index]).paths()[parent] if parent >= 0 else ()
        found = [drafts.tokens[index]]
        if rng.random() < 0.7 and not {END, STOP} & {*path}:
            replayed = matcher_of(compiled, [*tokens, *path], **sampling)
            found = (mask_of(replayed) or []) if replayed.error is None else found
        found = [token for token in found if token not in siblings] or [
            token for token in range(len(PIECES)) if token not in siblings]
        chosen.append(int(rng.choice(found)))
    return Drafts(tuple(chosen), drafts.parents)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("sampling", [{}, {"min_new_tokens": 6}, {"ignore_eos": True, "stop_token_ids": (STOP,)}],
                         ids=str)
def test_rows_of_drafts(compiled, name, sampling):
    rng = np.random.default_rng(len(name))
    followed = cut = 0
    for _ in range(4):
        buffer = TokenBuffer([0])
        matcher, tokens = matcher_of(compiled[name], buffer, **sampling), []
        for _ in range(8):
            drafts = likely_drafts(rng, compiled[name], tokens, **sampling)
            before = state_of(matcher)
            kept = matcher.allowed(drafts)
            assert state_of(matcher) == before
            for path in drafts.paths():
                allowed = not {END, STOP} & set(path) and matcher_of(compiled[name], [*tokens, *path]).error is None
                assert allowed == (kept is not None and path in kept.paths())
                followed, cut = followed + allowed, cut + (not allowed)
            for path in [(), *(kept.paths() if kept else ())]:
                assert matcher.move(path)
                replayed = matcher_of(compiled[name], [*tokens, *path], **sampling)
                assert mask_of(matcher) == mask_of(replayed)
                assert state_of(matcher) == state_of(replayed)
            paths = [(), *(kept.paths() if kept else ())]
            accepted = paths[int(rng.integers(0, len(paths)))]
            choices = mask_of(matcher_of(compiled[name], [*tokens, *accepted], **sampling))
            new = [*accepted, int(rng.choice(choices))]
            if new[-1] in (END, STOP):
                break
            tokens += new
            for token in new:
                buffer.append(token)
            assert matcher.advance()
            assert state_of(matcher) == state_of(matcher_of(compiled[name], tokens, **sampling))
    assert followed > 9 and cut > 9


def test_an_answer_ends_as_without_drafts(compiled):
    buffer = TokenBuffer([0, PIECES.index(b"ab")])
    matcher = matcher_of(compiled["words"], buffer)
    assert matcher.move((PIECES.index(b"cd"), PIECES.index(b"ab")))
    buffer.append(PIECES.index(b"cd"))
    buffer.append(END)
    assert matcher.error_at_end() is None
    assert matcher.grammar.is_completed() and len(matcher) == 2
    assert not matcher.move((END,))


def test_a_dead_end_behind_a_draft_is_no_failure(backend):
    """Nothing can follow the draft: its row is void, and the request fails only once the draft is its token."""
    compiled = begin_of(backend, GrammarSpec("regex", "a|bc"), Vocabulary([b"a", b"b", b"<end>"], [2], [2]))
    buffer = TokenBuffer([9])
    matcher = Matcher(compiled, buffer, 1, frozenset((2,)), frozenset((2,)), SamplingParams())
    assert matcher.advance() and matcher.allowed(Drafts((1,))) == Drafts((1,)) and matcher.move((1,))
    filler = MaskFiller(3, backend.fill_together)
    assert filler.fill([matcher]) == [None] and matcher.error is None
    assert matcher.move(()) and filler.fill([matcher]) != [None]
    buffer.append(1)
    assert matcher.advance() and filler.fill([matcher]) != [None]
    assert "No token of the model" in str(matcher.error)


class Broken:
    """A grammar's state whose method ``name`` raises, after ``count`` calls."""

    def __init__(self, grammar, name, count):
        self._grammar, self._name, self._left = grammar, name, count

    def __getattr__(self, name):
        if name == self._name:
            if not self._left:
                raise RuntimeError("as asked")
            self._left -= 1
        return getattr(self._grammar, name)


@pytest.mark.parametrize(("name", "count"), [("accept_token", 1), ("rollback", 0), ("fill_next_token_bitmask", 0)])
def test_drafts_that_break_a_matcher_only_end_its_drafts(compiled, name, count, caplog):
    ab, cd = PIECES.index(b"ab"), PIECES.index(b"cd")
    buffer = TokenBuffer([0, ab])
    matcher = matcher_of(compiled["words"], buffer)
    matcher.grammar = Broken(matcher.grammar, name, count)
    matcher.move((cd, ab))
    if name == "fill_next_token_bitmask":
        assert mask_of(matcher) is None
    matcher.move(())
    assert matcher.error is None and not isinstance(matcher.grammar, Broken)
    assert state_of(matcher) == state_of(matcher_of(compiled["words"], [ab]))
    assert matcher.allowed(Drafts((cd,))) is None and not matcher.move((cd,))
    assert mask_of(matcher) == mask_of(matcher_of(compiled["words"], [ab]))
    assert "failed on drafts after 1 tokens" in caplog.text


def test_drafts_that_take_too_long_end(compiled):
    matcher, a = matcher_of(compiled["letters"], []), PIECES.index(b"a")
    with patch("time.thread_time", side_effect=(0.6 * tick for tick in range(99))):
        assert matcher.allowed(Drafts((a, a))) == Drafts((a, a))
        assert matcher.allowed(Drafts((a, a))) is None
    assert matcher.error is None and matcher.advance() and mask_of(matcher)
