"""sglang-router's ``prefix_hash``: the same worker for the same beginning of a prompt, unless it has too much to do.

Needs no memory of prompts: a hash of the first tokens chooses a position on the ring of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..net.body import RoutingFields
from ..net.request import Request
from ..workers.registry import Worker
from .base import Decision, Policy, prompt_text
from .consistent_hash import WorkerRing
from .load_view import LoadView

BYTES_PER_TOKEN = 4
"""An estimate for text: the router has no tokenizer."""


class PrefixHash:
    """By the first ``token_count`` tokens; where their worker has more than ``load_factor`` times the mean of the
    requests in flight, and for requests without a prompt, the least loaded one."""

    def __init__(self, token_count: int = 256, load_factor: float = 1.25):
        self._tokens = token_count
        self._factor = load_factor
        self._ring = WorkerRing()
        self._loads = LoadView()

    def read(self, request: Request, fields: RoutingFields | None) -> bytes:
        """Returns the beginning of the prompt."""
        text = prompt_text(request, fields)
        if text[:1] == b"[" and text[1:9].lstrip()[:1].isdigit():
            return b",".join(text[:self._tokens * 16].split(b",", self._tokens)[:self._tokens])
        return text[:self._tokens * BYTES_PER_TOKEN]

    def choose(self, workers: Sequence[Worker], subject: bytes) -> Decision:
        if len(workers) == 1:
            return Decision(workers[0], "only")
        loads = self._loads
        loads.refresh(workers)
        if not subject:
            return Decision(loads.least_loaded({}), "no_prompt")
        worker = self._ring.owner(workers, subject)
        if worker.load <= (loads.total + 1) / len(workers) * self._factor:
            return Decision(worker, "prefix")
        return Decision(loads.least_loaded({}), "balance")


@ROUTING_POLICIES.register("prefix_hash")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return PrefixHash(args.prefix_token_count, args.prefix_hash_load_factor)
