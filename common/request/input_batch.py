"""Input batch: a persistent decode batch, the same requests with one token each in every step.

The arrays that a step needs of its requests persist, and a step advances them. Gathering them anew from 256 requests
would take a microsecond a request and more, in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from operator import attrgetter

import msgspec
import numpy as np

from ..forward.chain_rows import ChainRows
from ..forward.forward_batch import NO_COLUMNS, BatchColumns, indptr_of, ragged_positions
from ..forward.tree_rows import tree_rows
from ..kvcache.manager import PageTable
from ..kvcache.page_columns import PageColumns
from .req import Req
from .sampling_metadata import SamplingMetadata
from .step_input import DraftPlan, StepInput, StepTokens

_PAGE_TABLE, _STOP_IDS = attrgetter("page_table"), attrgetter("stop_ids")
_NO_TOKENS = np.empty(0, np.int64)
_versions = count(1)


class InputBatch:
    """``reqs`` decode together until one leaves or joins: then a new batch reuses the arrays of this one.

    ``positions`` [B] int64 are those of the tokens that the next step computes; ``remaining`` [B] int64: steps that may
    be launched until the request has all the tokens that it asked for. A chain step in flight counts one token of each
    request: meanwhile positions are lower bounds, and ``remaining`` upper ones. ``extra_index``: rows of requests with
    row extras; ``all_greedy``: all others take the argmax. ``version`` identifies the batch. ``reused_rows``: the rows
    that its first requests had in the previous batch.
    """

    def __init__(self, reqs: list[Req], page_size: int, previous: InputBatch | None = None):
        """None of ``reqs`` may be complete, and each has computed all of its tokens but the last. ``previous`` was the
        last decode batch, and no other batch has computed its requests since."""
        self.reqs = reqs
        self.version = next(_versions)
        self._previous_version = -1 if previous is None else previous.version
        tables: list[PageTable] = list(map(_PAGE_TABLE, reqs))
        reused = self.reused_rows = self._rows_in(previous, tables)
        new = reqs[len(reused):]
        self.positions = np.array([req.num_computed_tokens for req in new], np.int64)
        self.remaining = np.array([req.num_prompt_tokens + req.sampling.max_new_tokens for req in new], np.int64)
        self.remaining -= self.positions + 1
        self.pages: PageColumns = (PageColumns(tables, page_size) if previous is None else
                                   previous.pages.select(reused, tables[len(reused):]))
        self._flags = np.array([(bool(req.extras), req.sampling.greedy, req.sampling.seed is not None) for req in new],
                               bool).reshape(-1, 3)
        self._unreported = list(range(len(reused), len(reqs)))
        self.stop_ids: frozenset[int] = frozenset().union(*set(map(_STOP_IDS, reqs)))
        self._last_tokens: list[int] = []  # of the first requests, as far as the host knows them
        self._num_in_flight = 0  # steps whose tokens are not recorded
        self._successor: InputBatch | None = None  # which reuses rows that are in flight
        self._rids: list[str] | None = None
        self._appends: list[Callable[[int], None]] | None = None  # of the requests' tokens
        if previous is not None and len(reused):
            self._reuse(previous, reused)
        self.extra_index: list[int] = np.flatnonzero(self._flags[:, 0]).tolist()
        self.all_greedy = bool(self._flags[:, :2].any(1).all())
        self._any_seeded = bool(self._flags[:, 2].any())
        self.min_remaining = int(self.remaining.min())
        self.removed_rows: list[int] = []
        self._metadata: list[SamplingMetadata] | None = None
        self._index = list(range(len(reqs)))
        self._own_rows = np.arange(len(reqs))
        self._ones = np.ones(len(reqs), np.int64)
        self._qo_indptr = np.arange(len(reqs) + 1, dtype=np.int32)

    def _reuse(self, previous: InputBatch, reused: np.ndarray) -> None:
        """Take over the state of the rows ``reused`` of ``previous``, the first of this batch."""
        self.positions = np.concatenate((previous.positions[reused], self.positions))
        self.remaining = np.concatenate((previous.remaining[reused], self.remaining))
        self._flags = np.concatenate((previous._flags[reused], self._flags))
        rows = reused.tolist()
        unreported = set(previous._unreported)
        self._unreported += [row for row, before in enumerate(rows) if before in unreported] if unreported else []
        if previous._num_in_flight:
            previous._successor = self
        elif len(previous._last_tokens) == len(previous.reqs):
            self._last_tokens = [previous._last_tokens[row] for row in rows]

    def __repr__(self) -> str:
        return f"InputBatch({len(self.reqs)} requests, {self.min_remaining} steps remain)"

    def __len__(self) -> int:
        return len(self.reqs)

    def unfinished(self, running: Sequence[Req]) -> list[Req]:
        """The requests of ``running`` that need more steps: first the batch's, in its order, then those that have
        joined since."""
        stays = self.remaining > 0
        stays[self.removed_rows] = False
        reqs = self.reqs if stays.all() else [self.reqs[row] for row in np.flatnonzero(stays).tolist()]
        joined = len(running) if reqs else 0
        while joined and running[joined - 1] is not reqs[-1]:
            joined -= 1
        return reqs + [req for req in running[joined:] if not req.complete]

    def last_step_rows(self) -> list[int]:
        """Rows of the requests whose last token the next step samples."""
        return np.flatnonzero(self.remaining == 1).tolist() if self.min_remaining == 1 else []

    def rows_without_page(self) -> list[int]:
        """Rows of the requests that have no page for the next step's token; see PageColumns."""
        return self.pages.rows_without_page(self.positions)

    def remove(self, reqs: Sequence[Req]) -> None:
        """Mark the rows of those ``reqs`` that are in the batch: they have ended or free their pages."""
        if len(reqs) == 1:  # list.index is faster for one
            self.removed_rows += [self.reqs.index(req) for req in reqs if req in self.reqs]
        else:
            leaving = set(reqs)
            self.removed_rows += [row for row, req in enumerate(self.reqs) if req in leaving]

    def advance(self) -> None:
        """Record that a step was launched."""
        for req in self.reqs:
            req.num_computed_tokens += 1
            req.num_pending += 1
        self._num_in_flight += 1
        self.positions = self.positions + 1
        self.remaining -= 1
        self.min_remaining -= 1

    def step(self, last: StepInput | None) -> StepInput:
        """The next step: one token of every request. All must have pages for it. ``last``: the step launched last."""
        return StepInput(self.reqs, self.columns(), self.positions, self._ones, self._ones, self._tokens(last),
                         self._index, self.sampling_metadata(), self.extra_index, self.all_greedy, input_batch=self,
                         rows_version=self.version, last_step_rows=self.last_step_rows())

    def columns(self) -> BatchColumns:
        """Positions, slots and pages of the next step."""
        slots = self.pages.slots(self.positions)
        return BatchColumns(self.positions, *slots[:-1], self._qo_indptr, 1, slots.further)

    def draft_step(self, plan: DraftPlan) -> StepInput:
        """The next step, which also verifies drafts. All requests must have pages for them, and no token may be
        pending."""
        drafts, q_lens = plan.drafts, plan.counts + 1
        qo_indptr = indptr_of(q_lens)
        known: list[int] = []
        for row, last in enumerate(self.last_tokens(reused_on_device=False)[0]):
            known.append(last)
            if row in drafts:
                known += drafts[row].tokens
        positions = ragged_positions(self.positions, q_lens, qo_indptr)
        slots = self.pages.ragged_slots(self.positions + plan.counts, q_lens, positions)
        tree = tree_rows(drafts, self.positions, q_lens)
        positions, mask = tree or (positions, None)
        columns = BatchColumns(positions, *slots[:-1], qo_indptr, int(q_lens.max()), slots.further,
                               verifies=bool(drafts), mask=mask)
        return StepInput(self.reqs, columns, self.positions, q_lens, q_lens, StepTokens(np.array(known, np.int64)),
                         self._index, self._draft_metadata(q_lens, positions), self.extra_index, self.all_greedy,
                         drafts=drafts, draft_limits=plan.limits, input_batch=self,
                         last_step_rows=self.last_step_rows())

    def chain_step(self, chains: ChainRows, known: DraftPlan | None = None) -> StepInput:
        """The next step as a chain step of ``chains``. Where requests have extras, ``known`` are its drafts, and no
        token may be pending."""
        if self.extra_index:
            assert known is not None, "a request with extras needs all tokens"
            return msgspec.structs.replace(self.draft_step(known), chains=chains)
        if self._metadata is None:
            self.sampling_metadata()
        assert self._metadata is not None
        return StepInput(self.reqs, NO_COLUMNS, self.positions, self._ones, self._ones, StepTokens(_NO_TOKENS),
                         self._index, self._metadata, (), self.all_greedy, chains=chains, input_batch=self)

    def _draft_metadata(self, q_lens: np.ndarray, positions: np.ndarray) -> Sequence[SamplingMetadata]:
        """Sampling metadata of all rows of a step with drafts."""
        owners: list[int] = np.repeat(self._index, q_lens).tolist()
        if not self._any_seeded:
            of_requests = self.sampling_metadata()
            return [of_requests[row] for row in owners]
        params = [req.sampling for req in self.reqs]
        return [SamplingMetadata(params[row], position + 1) for row, position in zip(owners, positions.tolist())]

    def _tokens(self, last: StepInput | None) -> StepTokens:
        """The tokens of the next step."""
        if last is not None and last.rows_version == self.version:
            return StepTokens(None, follows=last.number)
        reused = last is not None and last.rows_version == self._previous_version
        known, pending = self.last_tokens(reused_on_device=reused)
        sources: list[int] = self.reused_rows.tolist() if reused else []
        rows = list(range(len(sources))) + pending
        if pending:
            assert last is not None, "a pending token comes from a step"
            sources += [last.sample_of[self.reqs[row]] for row in pending]
        return StepTokens(np.array(known, np.int64), np.array(rows, np.int64), np.array(sources, np.int64),
                          0 if last is None else last.number)

    def rows_in(self, step: StepInput) -> np.ndarray | None:
        """Returns the rows [B] int64 that the requests have in a step of this batch or of the one before, -1 for those
        that have joined; None for another step."""
        version = -1 if step.input_batch is None else step.input_batch.version
        if version == self.version:
            return self._own_rows
        if version != self._previous_version:
            return None
        return np.concatenate((self.reused_rows, np.full(len(self.reqs) - len(self.reused_rows), -1)))

    def accept(self, counts: np.ndarray, token_ids: list[int]) -> None:
        """Record that the requests got ``counts`` [B] tokens in the oldest step in flight, not one each; the last of
        these are ``token_ids`` [B]."""
        self._add(counts - 1)
        self.record_tokens(token_ids)

    def _add(self, more: np.ndarray) -> None:
        """Record that the requests have ``more`` [B] tokens than was known."""
        self.positions = self.positions + more
        self.remaining = self.remaining - more
        self.min_remaining = int(self.remaining.min())
        if (batch := self._successor) is not None:
            reused = batch.reused_rows
            batch._add(np.concatenate((more[reused], np.zeros(len(batch) - len(reused), np.int64))))

    @property
    def launched_positions(self) -> np.ndarray:
        """Positions [B] int64 of the newest tokens of the oldest step in flight."""
        return self.positions - self._num_in_flight

    @property
    def has_successor(self) -> bool:
        """True where another batch has taken over rows while a step was in flight."""
        return self._successor is not None

    def record_tokens(self, token_ids: list[int]) -> None:
        """Record the tokens [B] of the oldest step in flight."""
        self._last_tokens = token_ids
        self._num_in_flight -= 1

    def append_tokens(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Append the pending token of each request, of ``rows`` where given; none ends with it."""
        if self._appends is None:
            self._appends = [req.tokens.append for req in self.reqs]
        reqs, appends = self.reqs, self._appends
        if rows is not None:
            reqs, appends = [reqs[row] for row in rows], [appends[row] for row in rows]
        for req, append, token_id in zip(reqs, appends, token_ids):
            req.num_pending -= 1
            append(token_id)

    def append_runs(self, runs: Sequence[list[int]], rows: Sequence[int]) -> None:
        """Append the tokens that each request of ``rows`` got, of which the first was pending; none ends with them."""
        reqs = self.reqs
        for row, run in zip(rows, runs):
            req = reqs[row]
            req.num_pending -= 1
            req.num_computed_tokens += len(run) - 1
            req.tokens.extend(run)

    def rows_ending(self, counts: np.ndarray) -> list[int]:
        """Rows of the requests that have all tokens once they got ``counts`` [B] in the oldest step in flight."""
        launched = self._num_in_flight
        if self.min_remaining + launched > int(counts.max()):
            return []
        return np.flatnonzero(self.remaining + launched <= counts).tolist()

    def last_tokens(self, *, reused_on_device: bool) -> tuple[list[int], list[int]]:
        """The last token [B] of each request, and the rows of those whose token the host does not know: 0 there.
        ``reused_on_device``: the tokens of the reused rows are read on the device, so they are 0 as well."""
        known = [0] * len(self.reused_rows) if reused_on_device else [] if self._num_in_flight else self._last_tokens
        rest = self.reqs[len(known):]
        return (known + [0 if req.num_pending else req.tokens.last for req in rest],
                [row for row, req in enumerate(rest, len(known)) if req.num_pending])

    def sampling_metadata(self) -> Sequence[SamplingMetadata]:
        """Sampling metadata of each row without extras. Only a seed makes the position matter."""
        if self._metadata is None or self._any_seeded:
            self._metadata = [SamplingMetadata(req.sampling, start + 1)
                              for req, start in zip(self.reqs, self.positions.tolist())]
        return self._metadata

    @property
    def rids(self) -> list[str]:
        """The requests' ids."""
        if self._rids is None:
            self._rids = [req.rid for req in self.reqs]
        return self._rids

    def rows_to_check(self, token_ids: Sequence[int], last_step_rows: Sequence[int],
                      with_extras: Iterable[int] = (), counts: np.ndarray | None = None) -> list[int]:
        """Rows, ascending, of the requests that have more to report than the tokens of a step whose results are
        processed: those that end, were removed, or report more than tokens, as rows ``with_extras`` do.
        ``last_step_rows``: as returned before the step was launched. ``counts`` [B]: the tokens of each row, one if
        None."""
        rows = {*self.removed_rows, *last_step_rows, *with_extras}
        if not self.stop_ids.isdisjoint(token_ids):
            owners = self._index if counts is None else np.repeat(self._index, counts).tolist()
            rows.update(row for row, token_id in zip(owners, token_ids) if token_id in self.stop_ids)
        if self._unreported:
            reqs = self.reqs
            self._unreported = [row for row in self._unreported if not reqs[row].reported or reqs[row].spans]
            rows.update(self._unreported)
        return sorted(rows)

    def _rows_in(self, previous: InputBatch | None, tables: list[PageTable]) -> np.ndarray:
        """The rows in ``previous`` of this batch's first requests, as far as they have the same order and page tables
        there."""
        if previous is None:
            return np.empty(0, np.int64)
        stays = previous.remaining > 0
        stays[previous.removed_rows] = False
        staying = np.flatnonzero(stays)
        rows = staying.tolist()
        if ([previous.reqs[row] for row in rows] == self.reqs[:len(rows)]
                and previous.pages.same_tables(rows, tables[:len(rows)])):
            return staying  # the usual case: requests joined, ended or were retracted
        return _matching_rows(self.reqs, previous)


def _matching_rows(reqs: list[Req], previous: InputBatch) -> np.ndarray:
    """The rows in ``previous`` of the first of ``reqs``, as far as they have the same order and page tables there."""
    rows: list[int] = []
    following = iter(reqs)
    expected = next(following, None)
    for row, req in enumerate(previous.reqs):
        if req is expected and req.page_table is not None and previous.pages.same_tables([row], [req.page_table]):
            rows.append(row)
            expected = next(following, None)
    return np.array(rows, np.int64)
