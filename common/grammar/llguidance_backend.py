"""The grammar backend of llguidance, also under the name of outlines.

outlines_core (0.2.14) builds an automaton over the tokens for each grammar; see docs/structured-output.md for what that
takes. It knows neither EBNF nor structural tags, nor recursive schemas; llguidance takes all that outlines does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import llguidance
import numpy as np

from ..api.errors import InvalidRequest
from ..api.grammar import GrammarSpec, Vocabulary
from ..config.server.answers import GRAMMAR_BACKENDS
from .backend import FillTogether, TooComplex
from .lark import Lark
from .lark_tags import TagWriter, read

_LARK = re.compile(r"\s*%llguidance\b")
_MAX_LEXER_STATES = 50_000
"""A state takes 1 to 2 KB."""
_BYTES_PER_CHARACTER = 512
"""A grammar with 300 strings takes 900 bytes a character of its source once all of it was used, 60,000 words 110."""
_MAX_REASON_CHARACTERS = 500
_DEAD_END = "NoExtensionBias"


@dataclass(frozen=True)
class Compiled:
    """A grammar in Lark, and the beginning that states are copies of."""

    text: str
    beginning: llguidance.LLMatcher = field(compare=False)

    @property
    def memory_size_bytes(self) -> int:
        """An estimate: the library does not say."""
        return _BYTES_PER_CHARACTER * len(self.text)

    def serialize_json(self) -> str:
        return self.text


class Compiler:
    """Compiles for one vocabulary. ``whitespace`` is a regular expression for the white space of JSON, None any."""

    def __init__(self, vocabulary: Vocabulary, whitespace: str | None):
        self._vocabulary = vocabulary
        self._whitespace = whitespace
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    def learn_vocabulary(self) -> None:
        """Prepares the vocabulary, which every grammar needs, before the first one comes."""
        _ = self._plain, self._with_specials

    def load(self, spec: GrammarSpec, text: str) -> Compiled:
        """Compiles the Lark that another process has written."""
        return Compiled(text, self._begin(spec, text))

    def compile(self, spec: GrammarSpec, max_threads: int | None = None) -> Compiled:
        """Compiles ``spec``; raises InvalidRequest with the reason."""
        try:
            text = self._lark(spec)
        except RecursionError:
            raise InvalidRequest(f"The {spec.kind} is too deeply nested to compile; simplify it.") from None
        return self.load(spec, text)

    def check_beginning(self, compiled: Compiled) -> None:
        """Raises InvalidRequest where no token of the vocabulary, nor the end, can be the first of an answer."""
        mask = np.zeros((1, -(len(self._vocabulary.token_bytes) // -32)), np.int32)
        try:
            State(compiled.beginning).fill_next_token_bitmask(mask, 0)
        except TooComplex as error:
            raise InvalidRequest(f"The grammar is too complex: {error}; simplify it.") from None
        if not mask.any():
            raise InvalidRequest("The grammar allows no answer: none of the model's tokens can begin one.")

    def _begin(self, spec: GrammarSpec, text: str) -> llguidance.LLMatcher:
        tokens = self._with_specials if spec.kind == "structural_tag" else self._plain
        matcher = llguidance.LLMatcher(tokens, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(f"The {spec.kind} cannot be used as a grammar: {_reason(matcher.get_error())}")
        return matcher

    def _lark(self, spec: GrammarSpec) -> str:
        lark = Lark(self._whitespace)
        match spec.kind:
            case "json_schema":
                return lark.text(lark.json_schema(json.loads(spec.text)))
            case "regex":
                return lark.text(lark.regex(spec.text))
            case "ebnf":
                if _LARK.match(spec.text):  # as with SGLang
                    return f'%llguidance {{"no_forcing": true}}\n{spec.text}'
                return lark.text(lark.ebnf(spec.text))
            case "structural_tag":
                return lark.text(TagWriter(lark, self._token_id).structural_tag(read(spec.text)))

    def _token_id(self, token: int | str) -> int:
        """Returns the id of the token with this id or text."""
        count = len(self._vocabulary.token_bytes)
        if isinstance(token, str) and token.encode() in self._ids:
            return self._ids[token.encode()]
        if isinstance(token, int) and 0 <= token < count:
            return token
        raise InvalidRequest(f"The structural_tag cannot be used as a grammar: the model has no token "
                             f"{str(token)[:80]!r}.")

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self._vocabulary.token_bytes)}

    @cached_property
    def _plain(self) -> llguidance.LLTokenizer:
        """The vocabulary where special tokens have no text: a string in JSON must not contain one."""
        return self._tokens([*self._vocabulary.special_ids, *self._vocabulary.stop_ids])

    @cached_property
    def _with_specials(self) -> llguidance.LLTokenizer:
        """The vocabulary with the text of special tokens: the markup of structural tags may consist of them."""
        return self._tokens(self._vocabulary.stop_ids)

    def _tokens(self, special_ids: list[int]) -> llguidance.LLTokenizer:
        tokens = _Tokens(self._vocabulary.token_bytes, sorted({*special_ids}), self._vocabulary.stop_ids[0])
        return llguidance.LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=self._vocabulary.stop_ids)


class _Tokens(llguidance.TokenizerWrapper):
    """The vocabulary as llguidance wants it; it never asks for tokens of a text, because no grammar forces any."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int):
        self.is_tokenizer_wrapper = True
        self.tokens, self.special_token_ids = tokens, special_ids
        self.eos_token_id, self.bos_token_id = eos_id, None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("the engine has no tokenizer")


class State:
    """A place in a grammar. A matcher of llguidance that has failed, also for a dead end, cannot go back: the way there
    is gone anew then."""

    def __init__(self, beginning: llguidance.LLMatcher):
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._tokens: list[int] = []

    def accept_token(self, token: int) -> bool:
        if self._matcher.is_error() or not self._matcher.try_consume_tokens([token]):
            self._check(self._matcher)
            return False
        self._tokens.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self._tokens[len(self._tokens) - num_tokens:]
        if self._matcher.is_error() or not self._matcher.rollback(num_tokens):
            self._matcher = self._beginning.deep_copy()
            if self._matcher.try_consume_tokens(self._tokens) != len(self._tokens):
                self._check(self._matcher)
                raise RuntimeError(f"llguidance does not follow {len(self._tokens)} tokens a second time")

    def fill_next_token_bitmask(self, words: np.ndarray, row: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(words[row].ctypes.data, words[row].nbytes)
        self.finish_mask(words, row)

    def finish_mask(self, words: np.ndarray, row: int) -> None:
        """Clears a mask that was computed where nothing can follow; raises RuntimeError where llguidance has failed."""
        if self._matcher.is_error():
            self._check(self._matcher)
            words[row] = 0

    def is_completed(self) -> bool:
        return not self._matcher.is_error() and self._matcher.is_accepting()

    def is_terminated(self) -> bool:
        return self._matcher.stop_reason() == "EndOfSentence"

    @property
    def matcher(self) -> llguidance.LLMatcher:
        return self._matcher

    def _check(self, matcher: llguidance.LLMatcher) -> None:
        """Raises the matcher's error; a dead end is none."""
        if not matcher.is_error():
            return
        reason = matcher.get_error()
        if reason.startswith(_DEAD_END):
            return
        if "panic" in reason:
            raise RuntimeError(reason)
        raise TooComplex(_reason(reason).rstrip("."))


@GRAMMAR_BACKENDS.register("llguidance", "outlines", needs={"llguidance": "llguidance"})
class LLGuidanceBackend:
    compiler = Compiler

    @staticmethod
    def state(compiled: Compiled) -> State:
        return State(compiled.beginning)

    @staticmethod
    def fill_together(max_threads: int) -> FillTogether:
        executor = llguidance.LLExecutor(max_threads)

        def fill(states: Sequence[State], words: np.ndarray, rows: Sequence[int]) -> None:
            executor.unsafe_compute_mask_ptr([(state.matcher, row) for state, row in zip(states, rows)],
                                             words.ctypes.data, words[0].nbytes, len(words))
            for state, row in zip(states, rows):
                state.finish_mask(words, row)

        return fill


def _reason(error: str) -> str:
    """Returns llguidance's message without its state and locations in the grammar, which is not the client's."""
    lines = error.split("<state>")[0].strip().splitlines() or ["unknown"]
    text = re.sub(r"^at \d+\(\d+\): ", "", lines[0])
    text += "".join(f" {line.strip()}" for line in lines[1:] if line.startswith("error:"))
    return f"{' '.join(text.split())[:_MAX_REASON_CHARACTERS].rstrip('.')}."
