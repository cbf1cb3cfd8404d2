"""An oracle for tests: it drafts the tokens that a request will have, some of them wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from baton.common.api.drafts import Drafts
from baton.common.request.req import Req


class Oracle:
    """Drafts from ``answers``, the output's tokens by request id; each draft is right with probability ``right``.
    Beyond the end of an answer it drafts at random. With a ``width`` above 1 it drafts so many tokens for a place, one
    of them right with that probability, and goes on after that."""

    def __init__(self, answers: Mapping[str, Sequence[int]], vocab_size: int, right: float = 0.7, width: int = 1):
        self._width = width
        self._answers = answers
        self._vocab_size = vocab_size
        self._right = right
        self.accepted: list[int] = []
        self.ended: list[str] = []

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Drafts | None]:
        return [self._propose(req, limit) for req, limit in zip(reqs, limits)]

    def _propose(self, req: Req, limit: int) -> Drafts | None:
        known = req.tokens.count - req.num_prompt_tokens
        rng = random.Random(f"{req.rid} {known}")
        following = list(self._answers[req.rid][known:known + limit])
        following += [rng.randrange(self._vocab_size) for _ in range(limit - len(following))]
        if self._width > 1:
            return self._tree(rng, following, limit)
        drafts = [token if rng.random() < self._right else rng.randrange(self._vocab_size) for token in following]
        return Drafts(tuple(drafts)) if drafts else None

    def _tree(self, rng: random.Random, following: Sequence[int], limit: int) -> Drafts | None:
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in following:
            found = rng.sample(range(self._vocab_size), self._width)
            if rng.random() < self._right and token not in found:
                found[rng.randrange(self._width)] = token
            begin = len(tokens)
            tokens += found
            parents += [parent] * self._width
            parent = begin + (found.index(token) if token in found else 0)
        return Drafts(tuple(tokens), tuple(parents)).first(limit) if tokens else None

    def on_verified(self, req: Req, drafts: Drafts, num_accepted: int) -> None:
        self.accepted.append(num_accepted)

    def on_end(self, reqs: Sequence[Req]) -> None:
        self.ended += [req.rid for req in reqs]
