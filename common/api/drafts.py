"""Drafts: tokens that may follow a request's newest one, which one step of the model verifies."""

from __future__ import annotations

from collections.abc import Sequence

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

    def paths(self) -> list[tuple[int, ...]]:
        """Returns for each draft the tokens from the first one after the newest token to itself."""
        if self.parents is None:
            return [self.tokens[:count] for count in range(1, len(self.tokens) + 1)]
        found: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents):
            found.append((token,) if parent < 0 else (*found[parent], token))
        return found

    def only(self, kept: Sequence[bool]) -> Drafts | None:
        """Returns the drafts that are ``kept`` [k] and whose parents are; None for none."""
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        index: dict[int, int] = {-1: -1}  # new by old
        for old, (keep, parent) in enumerate(zip(kept, parents)):
            if keep and parent in index:
                index[old] = len(index) - 1
        del index[-1]
        if len(index) == len(self.tokens):
            return self
        if not index:
            return None
        tokens = tuple(self.tokens[old] for old in index)
        if self.parents is None:
            return Drafts(tokens)
        return Drafts(tokens, tuple(index.get(self.parents[old], -1) for old in index))

    def chain(self) -> Drafts:
        """Returns the path that begins with the first draft and goes on to first children, as a chain."""
        if self.parents is None:
            return self
        path: list[int] = []
        last = -1
        for index, parent in enumerate(self.parents):
            if parent == last:
                path.append(self.tokens[index])
                last = index
        return Drafts(tuple(path))

    def first(self, count: int) -> Drafts | None:
        """Returns the first ``count`` of them, in which no parent is missing; None for none."""
        if count >= len(self.tokens):
            return self
        if count <= 0:
            return None
        return Drafts(self.tokens[:count], None if self.parents is None else self.parents[:count])
