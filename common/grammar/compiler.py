"""Grammars to xgrammar's compiled form. Importing this imports xgrammar, and with it torch."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np
import xgrammar

from ..api.errors import InvalidRequest
from ..api.grammar import GrammarSpec, Vocabulary

# What xgrammar puts wherever JSON may have white space. In a string of a schema these characters would be escaped.
_ANY_WHITESPACE = r"[ \n\r\t]*"
_LONGEST_REASON = 500
# xgrammar 0.2.8 prints a grammar's "ße" as \\xdfe, and reads that as one character.
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)


class Compiler:
    """Compiles for one vocabulary. ``whitespace`` is a regular expression for the white space of JSON, None any."""

    def __init__(self, vocabulary: Vocabulary, whitespace: str | None, max_threads: int):
        self._vocabulary = vocabulary
        self._whitespace = whitespace
        self._max_threads = max_threads

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """Raises InvalidRequest with the reason. May take any time and memory, or end the process."""
        try:
            return self._compile(spec)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # xgrammar's for mistakes in the source
            raise InvalidRequest(f"The {spec.kind} cannot be used as a grammar: {_reason(error)}") from None

    def check_beginning(self, compiled: xgrammar.CompiledGrammar) -> None:
        """Raises InvalidRequest where no token of the vocabulary, nor the end, can be the first of an answer."""
        mask = np.zeros((1, -(len(self._vocabulary.pieces) // -32)), np.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:len(self._vocabulary.pieces)]
        if not allowed.any():
            raise InvalidRequest("The grammar allows no answer: none of the model's tokens can begin one.")

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        match spec.kind:
            case "json_schema":
                if self._whitespace is None:
                    return self._plain.compile_json_schema(spec.text)
                return self._plain.compile_grammar(self._respaced(xgrammar.Grammar.from_json_schema(spec.text)))
            case "regex":
                return self._plain.compile_regex(spec.text)
            case "ebnf":
                return self._plain.compile_grammar(spec.text)
            case "structural_tag":
                compiled = self._with_specials.compile_structural_tag(spec.text)
                if self._whitespace is None:
                    return compiled
                return self._with_specials.compile_grammar(self._respaced(compiled.grammar))  # it knows tokens by name

    @cached_property
    def _plain(self) -> xgrammar.GrammarCompiler:
        """Special tokens have no text here: a string in JSON must not hold one."""
        special = set(self._vocabulary.special_ids)
        return self._compiler([b"" if i in special else piece for i, piece in enumerate(self._vocabulary.pieces)])

    @cached_property
    def _with_specials(self) -> xgrammar.GrammarCompiler:
        """Structural tags are about markup, which may well be special tokens."""
        return self._compiler(self._vocabulary.pieces)

    def _compiler(self, pieces: list[bytes]) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces),
                                      stop_token_ids=self._vocabulary.stop_ids)
        return xgrammar.GrammarCompiler(info, max_threads=self._max_threads, cache_enabled=False)

    def _respaced(self, grammar: xgrammar.Grammar) -> xgrammar.Grammar:
        assert self._whitespace is not None
        pattern = self._whitespace.replace("\\", "\\\\").replace('"', '\\"')
        text = _ESCAPE.sub(_four_digits, str(grammar)).replace(_ANY_WHITESPACE, "json_whitespace")
        return xgrammar.Grammar.from_ebnf(f'{text}\njson_whitespace ::= Regex("{pattern}")\n')


def _four_digits(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else f"\\u00{escape[1]}"


def _reason(error: Exception) -> str:
    """xgrammar's message without the places in its own source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: \(.*?\) is (?:false|true): ", "", text)
    text = " ".join(text.split())[:_LONGEST_REASON].rstrip(".")
    return f"{text or type(error).__name__}."
