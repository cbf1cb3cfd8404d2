"""The step pipeline: the host processes a step's results while the device runs the next one."""

from __future__ import annotations

from collections.abc import Callable

from ..forward.forward_batch import AfterGroup
from ..request.step_input import StepInput
from ..scheduler.batcher import Batcher
from ..scheduler.preemption.copy_rates import PrefillRate
from .executor import Executor
from .launched import Launched


class Pipeline:
    """Launches steps and passes the results of each to ``process_output``, with ``overlap`` after the next launch.

    ``in_flight`` is the step whose results have not been processed yet; while ``process_output`` runs it is already the
    next one.
    """

    def __init__(self, batcher: Batcher, executor: Executor, process_output: Callable[[Launched], None], *,
                 overlap: bool, rate: PrefillRate | None = None):
        """``rate`` measures prefill steps: it begins before a launch, and ``process_output`` ends it."""
        self._batcher = batcher
        self._executor = executor
        self._process_output = process_output
        self._overlap = overlap
        self._rate = rate
        self.in_flight: Launched | None = None

    def advance(self, step: StepInput | None, after_group: AfterGroup | None = None) -> bool:
        """Launches ``step``, if there is one, and processes the results of the one before; returns False where there
        was neither.

        ``after_group`` is Executor.launch's. Called once in each iteration, so that data-parallel ranks synchronize.
        """
        before, self.in_flight = self.in_flight, None
        if step is not None:
            if self._rate is not None:
                self._rate.begin(0 if step.num_decode_rows else step.num_tokens)
            self.in_flight = self._executor.launch(step, after_group)
            self._batcher.mark_launched(step)
        else:
            self._executor.run_idle_batch()
        if before is not None:
            self._process_output(before)
        # After a step with drafts the host must know how many tokens there are; where a drafter on the device finds the
        # next ones, before it schedules the next step, which may be later; not after a chain step.
        if not self._overlap or (step is not None and step.drafts and not step.draft_limits and step.chains is None):
            self.synchronize()
        return step is not None or before is not None

    def synchronize(self) -> None:
        """Waits for the step in flight and processes its results: afterwards no token is pending."""
        step, self.in_flight = self.in_flight, None
        if step is not None:
            self._process_output(step)
