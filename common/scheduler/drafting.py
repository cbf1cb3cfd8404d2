"""Drafting: asks a proposer for tokens that may follow those of running requests, and finds room for them."""

from __future__ import annotations

from collections.abc import Sequence

from ..api.drafts import Drafts
from ..config.server.speculative import SPECULATIVE_ALGORITHMS, SpeculativeArgs
from ..kvcache.manager import KVCacheManager
from ..request.input_batch import InputBatch
from ..request.req import Req
from ..request.step_input import StepInput
from ..request.step_output import StepOutput
from ..speculative.base import Proposer
from .prefill_budget import LOGPROB_CHUNK_TOKENS


class Drafting:
    """Drafts for the rows of an input batch. Rows with extras get none: their logits depend on the tokens before.

    Each draft needs logits, as a prompt's log-probabilities do, so that a step has as few of them.
    """

    def __init__(self, proposer: Proposer, cache: KVCacheManager, max_drafts: int,
                 max_step_tokens: int = LOGPROB_CHUNK_TOKENS):
        """``max_drafts``: tokens of one request in one step; ``max_step_tokens``: all tokens of a step with drafts."""
        self._proposer = proposer
        self._cache = cache
        self._max_drafts = max_drafts
        self._max_step_tokens = max_step_tokens
        self.num_steps = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def has_outlook(self, reqs: Sequence[Req]) -> bool:
        """True where some of ``reqs``, whose newest token may be pending, would get drafts now: then it is likely to
        get some once that token is known."""
        chosen = [req for req in reqs if not req.extras and not req.complete]
        return any(self._proposer.propose(chosen, [self._max_drafts] * len(chosen)))

    def drafts(self, batch: InputBatch) -> dict[int, Drafts]:
        """Returns the drafts of the next step, by row, with pages for them. No token may be pending."""
        with_extras = set(batch.extra_index)
        remaining = batch.remaining.tolist()
        rows = [row for row in range(len(batch)) if row not in with_extras and remaining[row] > 1]
        limits = [min(self._max_drafts, remaining[row] - 1) for row in rows]
        proposed = self._proposer.propose([batch.reqs[row] for row in rows], limits)
        positions = batch.positions.tolist()
        left = min(LOGPROB_CHUNK_TOKENS, self._max_step_tokens - len(batch))
        found: dict[int, Drafts] = {}
        for row, drafts, limit in zip(rows, proposed, limits):
            if drafts is None:
                continue
            count = max(0, min(len(drafts), limit, left))
            count = count and self._room(batch, row, positions[row], count)
            if (taken := drafts.first(count)) is not None:
                found[row] = taken
                left -= count
        return found

    def _room(self, batch: InputBatch, row: int, position: int, num_drafts: int) -> int:
        """Allocates pages for drafts after ``position``, where there are any; returns the number that have a page."""
        table, last = batch.reqs[row].page_table, position + num_drafts
        if batch.pages.capacity(row) <= last and table is not None:
            self._cache.allocate_next(table, last + 1, num_drafts)
            batch.pages.update_capacity(row)
        return min(last, batch.pages.capacity(row) - 1) - position

    def on_verified(self, step: StepInput, output: StepOutput) -> None:
        """Tell the proposer which drafts were accepted; the requests have their tokens."""
        self.num_steps += 1
        for row, drafts in step.drafts.items():
            accepted = output.counts[row] - 1
            self.num_drafted += len(drafts)
            self.num_accepted += accepted
            self._proposer.on_verified(step.reqs[row], drafts, accepted)

    def on_end(self, reqs: Sequence[Req]) -> None:
        """Tell the proposer that requests have ended."""
        self._proposer.on_end(reqs)


def make_drafting(args: SpeculativeArgs, cache: KVCacheManager, max_step_tokens: int) -> Drafting | None:
    """Builds the drafting of a rank's configuration; None without an algorithm. ``max_step_tokens``: the most tokens
    that the rank's buffers are made for."""
    if args.speculative_algorithm is None:
        return None
    algorithm = SPECULATIVE_ALGORITHMS.get(args.speculative_algorithm)
    assert algorithm.make_proposer is not None, "no algorithm drafts on the device yet"
    return Drafting(algorithm.make_proposer(args), cache, args.num_drafts, max_step_tokens)
