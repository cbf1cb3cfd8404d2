"""Drafting: which tokens the next step verifies, and room for them and for the drafts after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..api.drafts import Drafts
from ..kvcache.manager import KVCacheManager
from ..request.input_batch import InputBatch
from ..request.req import Req
from ..request.step_input import Chunk, DraftPlan, StepInput
from ..request.step_output import StepOutput
from ..speculative.base import Proposer
from ..speculative.draft_length import DraftLength
from .draft_stats import DraftStats
from .prefill_budget import LOGPROB_CHUNK_TOKENS

_STEPS_OF_OUTLOOK = 64
"""While drafts do not pay, every so many plain steps it is looked whether they do."""


class Drafting:
    """Plans the drafts of steps: those that a proposer finds on the host, or those that a drafter on the device has
    left with the requests. They get pages where there are any, and no request is retracted for them.

    Each draft needs logits, as a prompt's log-probabilities do, so that a step has as few of them.
    """

    def __init__(self, proposer: Proposer | None, cache: KVCacheManager, max_drafts: int,
                 max_step_tokens: int = LOGPROB_CHUNK_TOKENS, max_request_tokens: int = 1 << 40,
                 all_ranks_match: bool = True, num_passes: int | None = None, room: int | None = None):
        """``proposer``: None where a drafter on the device drafts, which needs slots for the drafts to come. ``max_``:
        tokens that are drafted for one request in one step; all tokens of a step with drafts; tokens of a request, for
        which there are positions. ``all_ranks_match``: the ranks that plan the same steps all have the matchers of
        grammars, so that these may cut drafts; otherwise forbidden drafts are verified in vain. ``num_passes``: those
        of the drafter in a step, ``room``: slots in which it drafts for a request; both as many as drafts by default.
        """
        self._proposer = proposer
        self._cache = cache
        self._max_drafts = max_drafts
        self._room = max_drafts if room is None else room
        self._max_step_tokens = max_step_tokens
        self._max_request_tokens = max_request_tokens
        self._all_ranks_match = all_ranks_match
        self._lengths: DraftLength | None = None
        self._chose_none = False
        self._num_outlooks = 0
        self._num_reqs = 0
        self.keeps_drafts = False
        """True where the drafter stores its keys and values in steps without drafts too; else these open gaps."""
        self.closes_gaps = False
        """True where a drafter that reads tokens alone computes what its pool lacks, see DraftPrefill."""
        self.stats = DraftStats(max_drafts if num_passes is None else num_passes, max_drafts)

    @property
    def on_device(self) -> bool:
        """True where the drafts of the next step are known when a step has run, not before."""
        return self._proposer is None

    def has_outlook(self, reqs: Sequence[Req]) -> bool:
        """True where some of ``reqs``, whose newest token may be pending, would get drafts now: then it is likely to
        get some once that token is known."""
        if self._lengths is not None and not self.keeps(reqs) and not self._may_pay(reqs):
            return False
        if self._proposer is None:
            return True
        chosen = [req for req in reqs if not req.complete]
        return any(self._proposer.propose(chosen, [self._max_drafts] * len(chosen)))

    def keeps(self, reqs: Sequence[Req]) -> bool:
        """True where plain steps of ``reqs`` store what a drafter needs to draft after them."""
        return self.keeps_drafts and not all(req.draft_gap for req in reqs)

    @property
    def _may_have_gaps(self) -> bool:
        return self.on_device and (self._lengths is not None or self.closes_gaps)

    def gaps(self, reqs: Sequence[Req]) -> list[Req]:
        """Returns those of ``reqs`` that may draft as soon as their gaps are closed: none while steps are plain."""
        may_draft = self._cache.has_draft_gaps if self._lengths is None else self._lengths.num_drafts > 0
        return [req for req in reqs if req.draft_gap] if may_draft else []

    def adapt(self, lengths: DraftLength) -> None:
        """Let ``lengths`` choose the number of drafts of each request in each step."""
        self._lengths = lengths

    def _may_pay(self, reqs: Sequence[Req]) -> bool:
        """False where drafts do not pay at present: then only a batch of another size, and a step now and then, may
        show that they do."""
        assert self._lengths is not None
        if self.on_device and not self.closes_gaps and all(req.draft_gap for req in reqs):
            return False
        changed, self._num_reqs = self._num_reqs != len(reqs), len(reqs)
        self._num_outlooks += 1
        return bool(self._lengths.num_drafts) or changed or self._num_outlooks % _STEPS_OF_OUTLOOK == 0

    def expected_drafts(self, reqs: Sequence[Req]) -> int:
        """Returns how many tokens of a step prompts had better leave for drafts of ``reqs``: those that a drafter has
        left, or the most that a proposer may find; at most half of a step's."""
        found = (len(reqs) * self._max_drafts if self._proposer is not None
                 else sum(len(req.drafts.tokens) for req in reqs if req.drafts is not None))
        return min(found, self._max_step_tokens // 2)

    def choose_depth(self, batch: InputBatch) -> int:
        """Returns how many tokens the next step of ``batch`` had better draft for each request; 0 for a plain step."""
        if self._lengths is None:
            return self._max_drafts
        if self.keeps_drafts and not self._may_pay(batch.reqs):
            return 0
        most = np.clip(batch.remaining - 1, 0, self._max_drafts)
        if not self.closes_gaps:
            gaps = [row for row, req in enumerate(batch.reqs) if req.draft_gap]
            if len(gaps) == len(batch):
                return 0
            most[gaps] = 0
        if not most.any():
            return 1
        depth = int(self._lengths.choose(batch.reqs, most, int(batch.positions.sum())).max())
        self.stats.num_rows = self._lengths.num_drafts + 1
        return depth

    def plan_decode(self, batch: InputBatch) -> DraftPlan:
        """Plans the drafts of the next step of ``batch``. No token may be pending."""
        plan = self._plan(batch.reqs, batch.positions, batch.remaining, batch.pages.capacities)
        if self._chose_none and self.on_device and not self.keeps_drafts:
            for req in batch.reqs:  # the step is plain: the drafter does not run
                assert req.page_table is not None
                if req.page_table.draft_gap is None:
                    req.page_table.draft_gap = req.num_computed_tokens
        return plan

    def plan_chunks(self, chunks: Sequence[Chunk], num_prefill: int) -> DraftPlan:
        """Plans the drafts of a step of ``chunks``, of which the first ``num_prefill`` are prompts. No token of the
        others may be pending."""
        limits = [self._limit_after(chunk) if chunk.samples else 0 for chunk in chunks[:num_prefill]]
        decoding = chunks[num_prefill:]
        counts = np.zeros(len(chunks), np.int64)
        drafts: dict[int, Drafts] = {}
        if decoding:
            reqs = [chunk.req for chunk in decoding]
            capacities = np.array([self._capacity(req) for req in reqs], np.int64)
            plan = self._plan(reqs, np.array([chunk.start for chunk in decoding], np.int64),
                              np.array([req.max_tokens - req.length for req in reqs], np.int64), capacities,
                              sum(chunk.stop - chunk.start for chunk in chunks[:num_prefill]))
            for row, found in plan.drafts.items():  # prompts have more rows than a tree's mask could have
                drafts[num_prefill + row] = chain = found.chain()
                counts[num_prefill + row] = len(chain)
            limits += plan.limits
        if not self.on_device:
            return DraftPlan(drafts, counts)
        return DraftPlan(drafts, counts, [limit for chunk, limit in zip(chunks, limits) if chunk.samples])

    def _plan(self, reqs: Sequence[Req], positions: np.ndarray, remaining: np.ndarray, capacities: np.ndarray,
              other_tokens: int = 0) -> DraftPlan:
        """Plans drafts of ``reqs``, whose newest tokens are at ``positions`` [B]; ``remaining`` [B]: tokens until each
        has all; ``capacities`` [B]: tokens that its pages hold, which is updated."""
        most = np.clip(remaining - 1, 0, self._max_drafts)
        gaps = [row for row, req in enumerate(reqs) if req.draft_gap] if self._may_have_gaps else []
        if self._lengths is not None:
            if not self.closes_gaps:
                most[gaps] = 0
            if self.keeps_drafts and not self._may_pay(reqs):
                chosen = np.zeros_like(most)
            else:
                chosen = self._lengths.choose(reqs, most, int(positions.sum()))
            self._chose_none = bool(most.any()) and not chosen.any()
            most = chosen
            self.stats.num_rows = self._lengths.num_drafts + 1
        most[gaps] = 0
        found = [drafts and self.usable(req, drafts) for req, drafts in zip(reqs, self._found(reqs, most))]
        counts = np.minimum([0 if drafts is None else len(drafts.tokens) for drafts in found], most)
        left = max(0, min(LOGPROB_CHUNK_TOKENS, self._max_step_tokens - len(reqs) - other_tokens))
        counts = _within(counts, left)
        verified = positions + 1 + counts
        after = np.zeros_like(counts)
        if self.on_device:
            after = np.clip(np.minimum(remaining - 2, self._room if self._lengths is None else most), 0,
                            np.maximum(self._max_request_tokens - verified, 0))
            after[gaps] = 0
        for row in np.flatnonzero(capacities < verified + after).tolist():
            capacities[row] = self._grow(reqs[row], int(positions[row]), int(verified[row]), int(after[row]), len(reqs))
        room = capacities - positions - 1
        counts = np.minimum(counts, room)
        if not self._cache.stores_drafts:
            for row in np.flatnonzero(counts).tolist():
                table = reqs[row].page_table
                assert table is not None
                counts[row] = self._cache.allocate_drafts(table, int(counts[row]))
        drafts: dict[int, Drafts] = {}
        for row, count in enumerate(counts.tolist()):
            if count and (own := found[row]) is not None and (first := own.first(count)) is not None:
                drafts[row] = first
        return DraftPlan(drafts, counts, np.minimum(after, room - counts).tolist() if self.on_device else ())

    def _found(self, reqs: Sequence[Req], most: np.ndarray) -> Sequence[Drafts | None]:
        if self._proposer is None:
            return [req.drafts for req in reqs]
        rows = np.flatnonzero(most).tolist()
        found: list[Drafts | None] = [None] * len(reqs)
        for row, drafts in zip(rows, self._proposer.propose([reqs[row] for row in rows], most[rows].tolist())):
            found[row] = drafts
        return found

    def usable(self, req: Req, drafts: Drafts) -> Drafts | None:
        """Returns those of the drafts that may become tokens: not those that end the request, which nothing follows,
        nor those that its grammar forbids."""
        if not req.stop_ids.isdisjoint(drafts.tokens):
            found = drafts.only([token not in req.stop_ids for token in drafts.tokens])
            if found is None:
                return None
            drafts = found
        if req.matcher is None or not self._all_ranks_match:
            return drafts
        req.matcher.advance()
        return req.matcher.allowed(drafts)

    def _grow(self, req: Req, position: int, verified: int, after: int, num_reqs: int) -> int:
        """Allocates pages for ``verified`` tokens of a request, whose newest is at ``position``, and for the ``after``
        ones that are drafted next, or for fewer, but leaves a page for the next token of each of ``num_reqs`` requests;
        returns the tokens that its pages hold."""
        table = req.page_table
        assert table is not None
        for wanted in (verified + after, verified):
            missing = self._cache.pages_for(wanted) - table.count
            if missing <= 0 or (missing + num_reqs <= self._cache.num_available
                                and self._cache.allocate_next(table, wanted, wanted - position - 1)):
                break
        return table.count * self._cache.page_size

    def _limit_after(self, chunk: Chunk) -> int:
        """Finds room for the drafts after the first token of a prompt; returns the most that there may be."""
        req, table = chunk.req, chunk.req.page_table
        assert table is not None
        limit = min(self._room, req.max_tokens - chunk.stop - 2, self._max_request_tokens - chunk.stop)
        if self._lengths is not None:
            limit = min(limit, self._lengths.num_drafts)
        if not self.on_device or limit <= 0 or req.draft_gap:
            return 0
        missing = self._cache.pages_for(chunk.stop + limit) - table.count
        # The step still reads pages of further groups that a decode step would not: no page is allocated there.
        if missing > 0 and not table.groups and missing < self._cache.num_available:
            self._cache.allocate_slots(table, chunk.stop + limit)
        return max(0, min(limit, self._capacity(req) - chunk.stop))

    def _capacity(self, req: Req) -> int:
        """The tokens that a request's pages hold."""
        assert req.page_table is not None
        return req.page_table.count * self._cache.page_size

    @property
    def num_steps(self) -> int:
        """Steps with drafts so far."""
        return self.stats.num_steps

    @property
    def num_drafted(self) -> int:
        return self.stats.num_drafted

    @property
    def num_accepted(self) -> int:
        return self.stats.num_accepted

    def count(self, step: StepInput, output: StepOutput, counts: np.ndarray) -> None:
        """Count the drafts of a step, whose requests got ``counts`` tokens, before these have them."""
        if not self._cache.stores_drafts:
            self._keep_accepted(step, output, counts)
        num_drafts = np.array(output.num_drafts, np.int64)
        places = np.flatnonzero(num_drafts)
        drafted, accepted = num_drafts[places], counts[places] - 1
        self.stats.add(drafted, accepted)
        if self._lengths is not None:
            reqs = [step.reqs[output.req_index[place]] for place in places.tolist()]
            kept = [place for place, req in enumerate(reqs) if not req.draft_gap]
            if not kept:
                return
            self._lengths.acceptance.observe([reqs[place] for place in kept], drafted[kept], accepted[kept])

    def _keep_accepted(self, step: StepInput, output: StepOutput, counts: np.ndarray) -> None:
        tokens = dict(zip(output.req_index, counts.tolist()))
        for index in step.drafts:
            if (table := step.reqs[index].page_table) is not None:
                self._cache.keep_accepted(table, step.chunks[index].stop - 1, max(0, tokens.get(index, 1) - 1))

    def on_verified(self, step: StepInput, output: StepOutput) -> None:
        """Tell the proposer which drafts were accepted; the requests have their tokens."""
        if self._proposer is None:
            return
        for index, count in zip(output.req_index, output.counts):
            if (drafts := step.drafts.get(index)) is not None:
                self._proposer.on_verified(step.reqs[index], drafts, count - 1)

    def on_end(self, reqs: Sequence[Req]) -> None:
        """Tell the proposer that requests have ended."""
        if self._lengths is not None:
            self._lengths.acceptance.forget(reqs)
        if self._proposer is not None:
            self._proposer.on_end(reqs)


def _within(counts: np.ndarray, total: int) -> np.ndarray:
    """Returns ``counts`` [n] or less, ``total`` in all: the largest are cut to one size, the first of them to one
    more."""
    if counts.sum() <= total:
        return counts
    size = int(counts.max())
    while np.minimum(counts, size).sum() > total:
        size -= 1
    cut: np.ndarray = np.minimum(counts, size)
    cut[np.flatnonzero(counts > size)[:total - int(cut.sum())]] += 1
    return cut
