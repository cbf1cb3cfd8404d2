"""Interface of grammar backends: libraries that compile grammars, follow an answer in one, and mask tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..api.errors import ServingError
from ..api.grammar import GrammarSpec, Vocabulary
from ..api.sampling import SamplingParams
from ..request.output_matcher import OutputMatcher
from ..request.token_buffer import TokenBuffer


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


class GrammarMaskFiller(Protocol):
    def fill(self, matchers: Sequence[Any]) -> list[Callable[[torch.Tensor, int], None] | None]:
        """Fills a mask for each of the backend's matchers; returns functions that copy it into a row of a bitmask, None
        where nothing can follow the drafts that a matcher has moved to."""


class GrammarBackend(Protocol):
    """A registered backend; its file is imported with the first grammar."""

    def compiler(self, vocabulary: Vocabulary, whitespace: str | None) -> GrammarCompiler:
        """Makes the compiler for a vocabulary; ``whitespace`` is a regular expression for that of JSON, None any."""

    def matcher(self, compiled: Any, tokens: TokenBuffer, start: int, stop_ids: frozenset[int],
                end_ids: frozenset[int], sampling: SamplingParams, error: ServingError | None) -> OutputMatcher:
        """Makes the matcher of an output that begins at ``tokens[start]``, as ``matcher.Matcher``."""

    def filler(self, vocab_size: int) -> GrammarMaskFiller: ...
