"""Steps one behind the other through the stages of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..forward.forward_batch import AfterGroup
from ..request.batch import ScheduledBatch
from ..scheduler.batcher import Batcher
from ..scheduler.preemption.copy_rates import PrefillRate
from .executor import Executor, StepOutput
from .pipeline import Pipeline
from .pp_executor import PPExecutor, PPStep


class PPPipeline:
    """Pipeline's calls, with up to ``PPExecutor.depth`` steps in flight.

    The results of a step are taken in when rank 0 had them at the turn's begin, or when the step has to make room. So
    nobody waits for the last stage while the first could compute what arrives meanwhile.
    """

    def __init__(self, batcher: Batcher, executor: PPExecutor, take_in: Callable[[PPStep], None], depth: int):
        self._batcher = batcher
        self._executor = executor
        self._take_in = take_in
        self._depth = depth
        self._steps: deque[PPStep] = deque()

    @property
    def in_flight(self) -> PPStep | None:
        """The step that was launched last, where its results have not been taken in yet."""
        return self._steps[-1] if self._steps else None

    def advance(self, batch: ScheduledBatch | None, after_group: AfterGroup | None = None) -> bool:
        """Launch ``batch``, if there is one, and take in results; False where there was neither."""
        if batch is not None:
            self._steps.append(self._executor.launch(batch, after_group))
            self._batcher.mark_launched(batch)
        count, ready = len(self._steps), self._executor.line.ready
        while self._steps and (len(self._steps) >= self._depth or self._steps[0].number < ready):
            self._take_in(self._steps.popleft())
        return batch is not None or len(self._steps) < count

    def synchronize(self) -> None:
        """Wait for all steps in flight and take in their results: afterwards no token is pending."""
        while self._steps:
            self._take_in(self._steps.popleft())


def pipeline_of(batcher: Batcher, executor: Executor | PPExecutor, take_in: Callable[[StepOutput | PPStep], None], *,
                overlap: bool, rate: PrefillRate | None = None) -> Pipeline | PPPipeline:
    """What advances this executor's steps; those through stages overlap as PPExecutor says."""
    if not isinstance(executor, PPExecutor):
        return Pipeline(batcher, executor, take_in, overlap=overlap, rate=rate)
    return PPPipeline(batcher, executor, take_in, executor.depth)
