"""The interface of grammar matchers, as requests and the executor use it."""

from __future__ import annotations

from typing import Protocol

from ..api.errors import ServingError


class OutputMatcher(Protocol):
    """Tracks the output of a request with a grammar. ``GrammarStore`` creates it and fills its masks."""

    def advance(self, pending: int | None = None) -> bool:
        """Accepts the request's new tokens, and ``pending``; returns False where no mask is needed."""

    def error_at_end(self) -> ServingError | None:
        """Returns why the ended output does not match the grammar; None where it does."""
