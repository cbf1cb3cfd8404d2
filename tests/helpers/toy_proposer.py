"""A toy speculative algorithm: it repeats the last tokens."""

from __future__ import annotations

import os

from baton.common.api.drafts import Drafts


class RepeatLastTokens:
    """Drafts the last ``width`` tokens again and again. Counts what it is told."""

    def __init__(self, args=None, width=2):
        self.width, self.limit = width, args.num_drafts if args else 99
        self.drafted, self.accepted, self.ended = 0, 0, []
        self.file = os.environ.get("TOY_PROPOSER_FILE")

    def propose(self, reqs, limits):
        found = []
        for req, limit in zip(reqs, limits):
            last = req.tokens.view()[-self.width:].tolist()
            found.append((last * (limit + 1))[:min(limit, self.limit)])
        return [Drafts(tuple(tokens)) if tokens else None for tokens in found]

    def on_verified(self, req, drafts, num_accepted):
        assert num_accepted <= len(drafts) and req.rid not in self.ended
        assert req.finish is not None or req.tokens.view()[-1 - num_accepted:-1].tolist() == list(
            drafts.tokens[:num_accepted])
        self.drafted += len(drafts)
        self.accepted += num_accepted

    def on_end(self, reqs):
        self.ended += [req.rid for req in reqs]
        if self.file:
            with open(self.file, "a") as file:
                print(self.drafted, self.accepted, file=file)
