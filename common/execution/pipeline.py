"""Steps one behind the other: the host takes in a step's results while the device runs the next one."""

from __future__ import annotations

from collections.abc import Callable

from ..forward.forward_batch import AfterGroup
from ..request.batch import ScheduledBatch
from ..scheduler.batcher import Batcher
from ..scheduler.preemption.copy_rates import PrefillRate
from .executor import Executor, StepOutput


class Pipeline:
    """Launches batches and hands the results of each to ``take_in``, with ``overlap`` after the next one is launched.

    ``in_flight`` is the step whose results have not been taken in yet; while ``take_in`` runs it is already the one
    after.
    """

    def __init__(self, batcher: Batcher, executor: Executor, take_in: Callable[[StepOutput], None], *, overlap: bool,
                 rate: PrefillRate | None = None):
        """``rate`` is told of every step before it is launched; ``take_in`` tells it of the end."""
        self._batcher = batcher
        self._executor = executor
        self._take_in = take_in
        self._overlap = overlap
        self._rate = rate
        self.in_flight: StepOutput | None = None

    def advance(self, batch: ScheduledBatch | None, after_group: AfterGroup | None = None) -> bool:
        """Launch ``batch``, if there is one, and take in the results of the one before; False where there was neither.

        ``after_group`` is Executor.launch's. To be called once a turn, so that data-parallel ranks meet.
        """
        before, self.in_flight = self.in_flight, None
        if batch is not None:
            if self._rate is not None:
                self._rate.begin(0 if batch.is_decode or batch.num_decode_rows else batch.num_tokens)
            self.in_flight = self._executor.launch(batch, after_group)
            self._batcher.mark_launched(batch)
        else:
            self._executor.accompany()
        if before is not None:
            self._take_in(before)
        if not self._overlap:
            self.synchronize()
        return batch is not None or before is not None

    def synchronize(self) -> None:
        """Wait for the step in flight and take in its results: afterwards no token is pending."""
        step, self.in_flight = self.in_flight, None
        if step is not None:
            self._take_in(step)
