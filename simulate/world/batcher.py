"""The real batcher without the arrays that only a device reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...common.forward.forward_batch import NO_COLUMNS
from ...common.request.input_batch import InputBatch
from ...common.request.step_input import Chunk, StepInput, StepTokens
from ...common.scheduler.batcher import Batcher
from ...common.scheduler.new_token_ratio import remaining_decrease
from .device import TOKEN

_NO_ROWS = np.empty(0, np.int64)
_NO_TOKENS = StepTokens(_NO_ROWS)


class VirtualBatcher(Batcher):
    """Decides as the batcher does: only the steps that it returns have no slots, pages and token ids."""

    def _chunk_step(self, chunks: Sequence[Chunk], num_prefill: int, drafts: bool = True) -> StepInput:
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        q_lens = np.array([chunk.stop for chunk in chunks], np.int64) - starts
        samples = [int(chunk.samples) for chunk in chunks]
        return StepInput([chunk.req for chunk in chunks], NO_COLUMNS, starts, q_lens, np.array(samples, np.int64),
                         _NO_TOKENS, [index for index, one in enumerate(samples) if one], (), (), True, num_prefill)

    def next_decode(self, *, drafts: bool = False) -> StepInput | None:
        batch = self._current_input_batch()
        if batch is None:
            return None
        self.page_budget.new_token_ratio.decay()
        rows = len(batch)
        return StepInput(batch.reqs, NO_COLUMNS, batch.positions, np.ones(rows, np.int64), _NO_ROWS, _NO_TOKENS,
                         list(range(rows)), (), (), True, input_batch=batch, rows_version=batch.version,
                         last_step_rows=batch.last_step_rows())

    def steady_batch(self, in_flight: StepInput) -> InputBatch | None:
        """The batch of a decode step in flight, where steps of the same requests follow it until one of them ends."""
        batch = in_flight.input_batch
        if (batch is None or batch is not self._input_batch or batch.removed_rows or batch._unreported
                or self._running_version != self.queues.running_version or batch._num_in_flight != 1):
            return None
        return batch

    def skip(self, batch: InputBatch, steps: int) -> None:
        """Do what so many decode steps of ``batch`` do, where all find pages and none is a request's last: launch them,
        and take in as many results, first those of the step in flight."""
        cache, queues = self.cache, self.queues
        ends = batch.positions + steps  # tokens that have a page afterwards
        pages = batch.pages
        for row in np.flatnonzero(pages.capacities < ends).tolist():
            table = batch.reqs[row].page_table
            assert table is not None and cache.allocate_slots(table, int(ends[row]))
            pages.update_capacity(row)
        ratio = self.page_budget.new_token_ratio
        for _ in range(steps):
            before = ratio.ratio
            ratio.decay()
            if ratio.ratio == before:
                break
        before_steps = batch.remaining
        batch.positions = ends
        batch.remaining = before_steps - steps
        batch.min_remaining -= steps
        queues.add_remaining(-remaining_decrease(before_steps, np.full(len(batch), steps)))
        batch._last_tokens = [TOKEN] * len(batch)
        tokens = [TOKEN] * steps
        for req in batch.reqs:
            req.num_computed_tokens += steps
            req.tokens.extend(tokens)


def pages_needed(batch: InputBatch, steps: int, page_size: int) -> int:
    """Pages that ``steps`` more decode steps of a batch allocate."""
    missing = batch.positions + steps - batch.pages.capacities
    return int(np.maximum(-(-missing // page_size), 0).sum())
