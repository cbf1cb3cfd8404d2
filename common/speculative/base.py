"""The interface of speculative algorithms: they draft tokens that the model then verifies in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..config.server.speculative import SpeculativeArgs
from ..request.req import Req


class Proposer(Protocol):
    """Drafts the next tokens of requests. All ranks of a tensor-parallel group must draft the same: a proposer reads no
    clock, and draws nothing."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Sequence[int]]:
        """Returns for each request the tokens that may follow ``req.tokens``, at most ``limits[i]`` of them, possibly
        none. Called also for an outlook, after which no step verifies the drafts."""

    def on_verified(self, req: Req, drafts: Sequence[int], num_accepted: int) -> None:
        """Called once the model has accepted the first ``num_accepted`` of a request's drafts; they are among its
        tokens."""

    def on_end(self, reqs: Sequence[Req]) -> None:
        """Called with requests that have ended."""


class ProposerFactory(Protocol):
    """A registered algorithm."""

    def __call__(self, args: SpeculativeArgs) -> Proposer: ...
