"""Drafts: tokens that may follow a request's newest one, which one step of the model verifies."""

from __future__ import annotations

import msgspec


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """The drafted ``tokens`` [k] of a request, parents before their children.

    ``parents`` [k]: the index of each one's parent in ``tokens``, -1 where it follows the newest token. None: they are
    a chain, each follows the one before.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def is_valid(self, vocab_size: int) -> bool:
        """True where all tokens are of the vocabulary, and each parent comes before its child."""
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        return (len(parents) == len(self.tokens) and all(0 <= token < vocab_size for token in self.tokens)
                and all(-1 <= parent < index for index, parent in enumerate(parents)))

    def first(self, count: int) -> Drafts | None:
        """Returns the first ``count`` of them, in which no parent is missing; None for none."""
        if count >= len(self.tokens):
            return self
        if count <= 0:
            return None
        return Drafts(self.tokens[:count], None if self.parents is None else self.parents[:count])
