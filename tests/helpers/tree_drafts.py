"""Trees of drafts that know the answers, with the right path anywhere in them, or broken off."""

from __future__ import annotations

import numpy as np

from baton.common.api.drafts import Drafts
from baton.tests.helpers.table_drafter import TableDrafter


def half_right_tree(rng, answer, size, vocab):
    """Up to ``size`` nodes: some of the first tokens of ``answer`` on one path, and others at random."""
    tokens, parents, right = [], [], [-1]
    for _ in range(size):
        depth = len(right) - 1
        if depth < len(answer) and rng.random() < 0.5:
            parent, token = right[-1], answer[depth]
        else:
            parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(vocab))
        if any(node == (parent, token) for node in zip(parents, tokens)):
            continue
        if parent == right[-1] and depth < len(answer) and token == answer[depth]:
            right.append(len(tokens))
        tokens.append(token)
        parents.append(parent)
    return Drafts(tuple(tokens), tuple(parents)) if tokens else None


class TreeOracle:
    """A proposer of such trees, and of chains now and then."""

    def __init__(self, answers, vocab, seed=0):
        self.answers, self.vocab, self.rng, self.accepted = answers, vocab, np.random.default_rng(seed), []

    def propose(self, reqs, limits):
        found = []
        for req, limit in zip(reqs, limits):
            answer = self.answers[req.rid][req.tokens.count - req.num_prompt_tokens:]
            kind = self.rng.integers(5)
            if kind == 0 or not limit:
                found.append(None)
            elif kind == 1:
                found.append(Drafts(tuple((answer + [1] * limit)[:limit])))
            else:
                found.append(half_right_tree(self.rng, answer, limit, self.vocab))
        return found

    def on_verified(self, req, drafts, num_accepted):
        self.accepted.append(num_accepted)

    def on_end(self, reqs):
        pass


class TreeDrafter(TableDrafter):
    """TableDrafter's checks, with trees for drafts."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rng = np.random.default_rng(0)

    def draft(self, step, index, count, limit):
        chain = super().draft(step, index, count, limit)
        if chain is None or next(self.calls) % 4 == 0:
            return chain
        return half_right_tree(self.rng, list(chain.tokens), limit, self.vocab)
