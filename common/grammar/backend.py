"""Interface of grammar backends: libraries that compile grammars, follow an answer in one, and mask tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..api.grammar import GrammarSpec, Vocabulary


class TooComplex(RuntimeError):
    """Raised by a ``GrammarState`` for a grammar that exceeds the library's limits on the way: the client's fault."""


class CompiledGrammar(Protocol):
    @property
    def memory_size_bytes(self) -> int: ...

    def serialize_json(self) -> str:
        """Returns the text that the compiler's ``load`` takes."""


class GrammarCompiler(Protocol):
    def learn_vocabulary(self) -> None:
        """Prepares the vocabulary, which every grammar needs, before the first one comes."""

    def compile(self, spec: GrammarSpec, max_threads: int | None = None) -> Any:
        """Returns a ``CompiledGrammar``; raises InvalidRequest with the reason. May take any time and memory."""

    def load(self, spec: GrammarSpec, text: str) -> Any:
        """Loads a grammar that another process has compiled."""

    def check_beginning(self, compiled: Any) -> None:
        """Raises InvalidRequest where no token, nor the end, can be the first of an answer."""


class GrammarState(Protocol):
    """A place in a grammar, with the way there. Methods raise RuntimeError where the library fails."""

    def accept_token(self, token: int) -> bool:
        """Goes on by a token; returns False, and stays, where the grammar forbids it."""

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""

    def fill_next_token_bitmask(self, words: np.ndarray, row: int) -> object:
        """Sets the bits of ``words[row]`` (int32) to the tokens that may follow, none where nothing can."""

    def is_completed(self) -> bool:
        """Returns True where the grammar may end."""

    def is_terminated(self) -> bool:
        """Returns True after a token that ends every answer."""


FillTogether = Callable[[Sequence[Any], np.ndarray, Sequence[int]], object]
"""Fills the masks of several states in threads: ``fill(states, words, rows)``; raises RuntimeError where one fails."""


class GrammarBackend(Protocol):
    """A registered backend; its file is imported with the first grammar."""

    def compiler(self, vocabulary: Vocabulary, whitespace: str | None) -> GrammarCompiler:
        """Makes the compiler for a vocabulary; ``whitespace`` is a regular expression for that of JSON, None any."""

    def state(self, compiled: Any) -> GrammarState:
        """Returns the beginning of a compiled grammar."""

    def fill_together(self, max_threads: int) -> FillTogether: ...
