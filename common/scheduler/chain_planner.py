"""The chain planner: decode steps that verify and draft chains on the device, also while the host does not know the
results of the step before."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from ..api.drafts import Drafts
from ..forward.chain_rows import ChainLevels, ChainRows
from ..kvcache.manager import KVCacheManager
from ..request.input_batch import InputBatch
from ..request.req import Req
from ..request.step_input import DraftPlan, StepInput
from .drafting import Drafting


class NoChain(Enum):
    """Why there is no chain step now."""

    WAIT = auto()
    """The host must know the results of the step in flight first."""
    OTHER = auto()
    """The next step is of another kind."""


class ChainPlanner:
    """Plans chain steps. Requests get pages for all that a step may write where there are any, but no request is
    retracted for these: rows without a page are void."""

    def __init__(self, levels: ChainLevels, cache: KVCacheManager, drafting: Drafting,
                 max_request_tokens: int = 1 << 40):
        """``max_request_tokens``: for which there are positions."""
        self._levels = levels
        self._cache = cache
        self._drafting = drafting
        self._max_request_tokens = max_request_tokens
        self._unknown: tuple[np.ndarray, np.ndarray] | None = None

    def next(self, batch: InputBatch, in_flight: StepInput | None) -> StepInput | NoChain:
        """Returns the next step of ``batch``. ``in_flight``: the chain step whose results the host does not know; all
        requests must have a page for their next token where there is none."""
        width = 0 if self._wants_hidden_states(batch) else self._width(batch)
        if in_flight is None:
            return self._known(batch, width) if width else NoChain.OTHER
        sources = None if batch.extra_index or not width else batch.rows_in(in_flight)
        if sources is None:
            return NoChain.WAIT
        num_joined = int(np.count_nonzero(sources < 0))  # the last ones
        if num_joined and any(req.num_pending for req in batch.reqs[-num_joined:]):
            return NoChain.WAIT
        return self._following(batch, width, in_flight, sources, num_joined)

    def _wants_hidden_states(self, batch: InputBatch) -> bool:
        return any(batch.reqs[row].hidden is not None for row in batch.extra_index)

    def _width(self, batch: InputBatch) -> int:
        """Returns the rows of a request in the next step, 0 where that is no chain step."""
        num_drafts = self._drafting.choose_depth(batch)
        if not num_drafts and not (self._levels.has_plain and self._drafting.keeps(batch.reqs)):
            return 0
        return self._levels.width_for(len(batch), num_drafts) or 0

    def _following(self, batch: InputBatch, width: int, last: StepInput, sources: np.ndarray,
                   num_joined: int) -> StepInput | NoChain:
        """Plans a step whose tokens and drafts the step ``last`` leaves on the device, but for the last ``num_joined``
        requests, which have joined since."""
        chains, positions = last.chains, batch.positions
        assert chains is not None
        newest = np.minimum(chains.limits[sources], positions + (chains.width - 1))  # upper bounds
        if num_joined:
            newest[-num_joined:] = positions[-num_joined:]
        if not self._grow(batch, newest, width):
            return NoChain.WAIT
        limits = self._limits(batch)
        num_left = min(chains.width, width) - 1
        if num_joined:
            first = len(batch) - num_joined
            tokens, num_drafts, _ = self._known_rows(batch, width, limits, first)
            num_drafts[:first] = num_left
        else:
            tokens, num_drafts = self._unknown_rows(len(batch), width, num_left)
        return batch.chain_step(ChainRows(width, sources, positions, tokens, num_drafts, limits,
                                          *self._pages(batch, newest, width), last.number))

    def _known(self, batch: InputBatch, width: int) -> StepInput:
        """Plans a step whose tokens the host knows."""
        positions = batch.positions
        self._grow(batch, positions, width)
        limits = self._limits(batch)
        tokens, num_drafts, drafts = self._known_rows(batch, width, limits)
        rows = ChainRows(width, np.full(len(batch), -1), positions, tokens, num_drafts, limits,
                         *self._pages(batch, positions, width))
        return batch.chain_step(rows, DraftPlan(drafts, num_drafts))

    def _limits(self, batch: InputBatch) -> np.ndarray:
        """Returns ChainRows.limits: the last token of a request is not computed."""
        limits: np.ndarray = np.minimum(batch.pages.capacities, batch.positions + batch.remaining)
        np.minimum(limits, self._max_request_tokens, out=limits)
        return limits

    def _pages(self, batch: InputBatch, newest: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, int]:
        return batch.pages.padded(newest + 2 * width - 1, self._levels.scratch_page)

    def _known_rows(self, batch: InputBatch, width: int, limits: np.ndarray,
                    first: int = 0) -> tuple[np.ndarray, np.ndarray, dict[int, Drafts]]:
        """Returns ``tokens`` and ``num_drafts`` of ChainRows, and the drafts, of the rows from ``first`` on."""
        lists = [[0] * width] * first
        counts = [0] * first
        found: dict[int, Drafts] = {}
        rooms = np.minimum(limits - batch.positions, width) - 1
        for row, (req, room) in enumerate(zip(batch.reqs[first:], rooms[first:].tolist()), first):
            drafts = None if req.drafts is None or req.draft_gap else req.drafts.first(room)
            if drafts is not None and req.extras:
                drafts = self._drafting.usable(req, drafts)
            ids = () if drafts is None else drafts.tokens
            if drafts is not None:
                found[row] = drafts
            lists.append([req.tokens.last, *ids, *[0] * (width - 1 - len(ids))])
            counts.append(len(ids))
        return np.array(lists, np.int64), np.array(counts, np.int64), found

    def _unknown_rows(self, count: int, width: int, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``tokens`` and ``num_drafts`` of ChainRows, all of which are on the device."""
        if self._unknown is None or self._unknown[0].shape != (count, width) or self._unknown[1][0] != num_drafts:
            self._unknown = np.zeros((count, width), np.int64), np.full(count, num_drafts)
        return self._unknown

    def _grow(self, batch: InputBatch, newest: np.ndarray, width: int) -> bool:
        """Allocates pages for all that a step may write whose newest tokens are at ``newest`` [B] at most. Where pages
        are short it leaves one for the next token of each request; returns False where a newest token has none."""
        pages, cache, size = batch.pages, self._cache, self._cache.page_size
        use = batch.positions + batch.remaining
        wanted = np.minimum(newest + (2 * width - 1), use)
        rows = pages.rows_without_page(wanted - 1)
        if not rows:
            return True
        missing = int((-(-wanted[rows] // size) - pages.capacities[rows] // size).sum())
        if missing + len(batch) <= cache.num_available:
            while rows and pages.append_pages(cache, rows):
                rows = pages.rows_without_page(wanted - 1)
        needed = np.minimum(newest + 1, use)
        for row, most, least in zip(rows, wanted[rows].tolist(), needed[rows].tolist()):
            self._grow_row(batch.reqs[row], most, least, len(batch))
            pages.update_capacity(row)
        return bool((pages.capacities >= needed).all())

    def _grow_row(self, req: Req, wanted: int, needed: int, num_reqs: int) -> None:
        table, cache = req.page_table, self._cache
        assert table is not None
        missing = cache.pages_for(wanted) - table.count
        if missing > 0 and not (missing + num_reqs <= cache.num_available and cache.allocate_slots(table, wanted)):
            cache.allocate_slots(table, needed)


def num_verified(chains: ChainRows, batch: InputBatch) -> np.ndarray:
    """Returns how many drafts [B] of each request the oldest step of ``batch`` in flight has verified, as far as their
    rows were not void: none of those that have ended before."""
    drafted: np.ndarray = np.minimum(chains.num_drafts, chains.limits - 1 - batch.launched_positions)
    drafted[batch.removed_rows] = 0
    np.maximum(drafted, 0, out=drafted)
    return drafted
