"""The interface of grammar matchers, as requests and the executor use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..api.drafts import Drafts
from ..api.errors import ServingError


class OutputMatcher(Protocol):
    """Tracks the output of a request with a grammar. ``GrammarStore`` creates it and fills its masks."""

    def advance(self, pending: int | None = None) -> bool:
        """Accepts the request's new tokens, and ``pending``; returns False where no mask is needed."""

    def allowed(self, drafts: Drafts) -> Drafts | None:
        """Returns those of ``drafts``, which may follow the accepted tokens, that the grammar allows and that do not
        end the request."""

    def move(self, path: Sequence[int]) -> bool:
        """Follows the drafts ``path`` after the accepted tokens: the mask that is filled next is that of the token
        after them. Returns False where it cannot. Afterwards ``move(())`` goes back."""

    def error_at_end(self) -> ServingError | None:
        """Returns why the ended output does not match the grammar; None where it does."""
