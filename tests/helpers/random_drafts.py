"""Random drafts: chains and trees."""

from __future__ import annotations

import numpy as np

from baton.common.api.drafts import Drafts


def random_tree(rng: np.random.Generator, count: int, vocab_size: int) -> Drafts:
    """A tree of ``count`` drafts; those of one parent differ."""
    parents = [int(rng.integers(-1, index)) if index else -1 for index in range(count)]
    tokens: list[int] = []
    for index, parent in enumerate(parents):
        siblings = {tokens[other] for other in range(index) if parents[other] == parent}
        tokens.append(int(rng.choice([token for token in range(vocab_size) if token not in siblings])))
    return Drafts(tuple(tokens), tuple(parents))


def random_chain(rng: np.random.Generator, count: int, vocab_size: int) -> Drafts:
    return Drafts(tuple(rng.integers(0, vocab_size, count).tolist()))
