"""Compiles grammars with xgrammar. Importing this module imports xgrammar, and with it torch."""

from __future__ import annotations

import os
import re
from functools import cached_property

import numpy as np
import xgrammar

from ..api.errors import InvalidRequest
from ..api.grammar import GrammarSpec, Vocabulary
from .patterns import check_patterns

# xgrammar inserts it wherever JSON may have white space. In a string of a schema these characters would be escaped.
_ANY_WHITESPACE = r"[ \n\r\t]*"
_MAX_REASON_CHARACTERS = 500
# xgrammar 0.2.8 prints a grammar's "ße" as \\xdfe, and reads that as one character.
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)


class Compiler:
    """Compiles for one vocabulary. ``whitespace`` is a regular expression for the white space of JSON, None any."""

    def __init__(self, vocabulary: Vocabulary, whitespace: str | None):
        self._vocabulary = vocabulary
        self._whitespace = whitespace

    def learn_vocabulary(self) -> None:
        """Prepares the vocabulary, which every grammar needs, before the first one comes."""
        _ = self._plain, self._with_specials

    def load(self, spec: GrammarSpec, text: str) -> xgrammar.CompiledGrammar:
        """Loads a grammar that another process has compiled, in a thirtieth of the time of compiling."""
        return xgrammar.CompiledGrammar.deserialize_json(text, self._tokens_of(spec))

    def compile(self, spec: GrammarSpec, max_threads: int | None = None) -> xgrammar.CompiledGrammar:
        """Compiles ``spec``; raises InvalidRequest with the reason. May take any time and memory, or end the
        process."""
        threads = max_threads or max(1, min(4, (os.cpu_count() or 1) // 2))
        if spec.kind in ("json_schema", "structural_tag"):
            check_patterns(spec.kind, spec.text)
        try:
            return self._compile(spec, xgrammar.GrammarCompiler(self._tokens_of(spec), max_threads=threads,
                                                                cache_enabled=False))
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # xgrammar's for mistakes in the source
            raise InvalidRequest(f"The {spec.kind} cannot be used as a grammar: {_reason(error)}") from None

    def check_beginning(self, compiled: xgrammar.CompiledGrammar) -> None:
        """Raises InvalidRequest where no token of the vocabulary, nor the end, can be the first of an answer."""
        mask = np.zeros((1, -(len(self._vocabulary.token_bytes) // -32)), np.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:len(self._vocabulary.token_bytes)]
        if not allowed.any():
            raise InvalidRequest("The grammar allows no answer: none of the model's tokens can begin one.")

    def _compile(self, spec: GrammarSpec, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
        match spec.kind:
            case "json_schema":
                if self._whitespace is None:
                    return compiler.compile_json_schema(spec.text)
                return compiler.compile_grammar(self._replace_whitespace(xgrammar.Grammar.from_json_schema(spec.text)))
            case "regex":
                return compiler.compile_regex(spec.text)
            case "ebnf":
                return compiler.compile_grammar(spec.text)
            case "structural_tag":
                compiled = compiler.compile_structural_tag(spec.text)
                if self._whitespace is None:
                    return compiled
                return compiler.compile_grammar(self._replace_whitespace(compiled.grammar))  # it knows tokens by name

    def _tokens_of(self, spec: GrammarSpec) -> xgrammar.TokenizerInfo:
        return self._with_specials if spec.kind == "structural_tag" else self._plain

    @cached_property
    def _plain(self) -> xgrammar.TokenizerInfo:
        """The vocabulary where special tokens have no text: a string in JSON must not contain one."""
        special = set(self._vocabulary.special_ids)
        return self._tokens([b"" if i in special else text for i, text in enumerate(self._vocabulary.token_bytes)])

    @cached_property
    def _with_specials(self) -> xgrammar.TokenizerInfo:
        """The vocabulary with the text of special tokens: the markup of structural tags may consist of them."""
        return self._tokens(self._vocabulary.token_bytes)

    def _tokens(self, token_bytes: list[bytes]) -> xgrammar.TokenizerInfo:
        return xgrammar.TokenizerInfo(token_bytes, xgrammar.VocabType.RAW, vocab_size=len(token_bytes),
                                      stop_token_ids=self._vocabulary.stop_ids)

    def _replace_whitespace(self, grammar: xgrammar.Grammar) -> xgrammar.Grammar:
        assert self._whitespace is not None
        pattern = self._whitespace.replace("\\", "\\\\").replace('"', '\\"')
        text = _ESCAPE.sub(_four_digits, str(grammar)).replace(_ANY_WHITESPACE, "json_whitespace")
        return xgrammar.Grammar.from_ebnf(f'{text}\njson_whitespace ::= Regex("{pattern}")\n')


def _four_digits(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else f"\\u00{escape[1]}"


def _reason(error: Exception) -> str:
    """Returns xgrammar's message without locations in its source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: \(.*?\) is (?:false|true): ", "", text)
    text = " ".join(text.split())[:_MAX_REASON_CHARACTERS].rstrip(".")
    return f"{text or type(error).__name__}."
