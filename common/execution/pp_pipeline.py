"""The step pipeline with pipeline parallelism: several steps in flight through the stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..forward.forward_batch import AfterGroup
from ..request.step_input import StepInput
from ..scheduler.batcher import Batcher
from ..scheduler.preemption.copy_rates import PrefillRate
from .executor import Executor
from .launched import Launched
from .pipeline import Pipeline
from .pp_executor import PPExecutor, PPStep


class PPPipeline:
    """Pipeline's interface, with up to ``depth`` steps in flight.

    The results of a step are processed where rank 0 had them at the beginning of the iteration, or ``depth`` is
    reached. So no rank waits for the last stage while the first could compute new requests.
    """

    def __init__(self, batcher: Batcher, executor: PPExecutor, process_output: Callable[[PPStep], None], depth: int,
                 rate: PrefillRate | None = None):
        self._batcher = batcher
        self._executor = executor
        self._process_output = process_output
        self._depth = depth
        self._rate = rate
        self._steps: deque[PPStep] = deque()

    @property
    def in_flight(self) -> PPStep | None:
        """The step that was launched last, where its results have not been processed yet."""
        return self._steps[-1] if self._steps else None

    def advance(self, step: StepInput | None, after_group: AfterGroup | None = None) -> bool:
        """Launches ``step``, if there is one, and processes results; returns False where there was neither."""
        if step is not None:
            if self._rate is not None:
                self._rate.begin(0 if step.num_decode_rows else step.num_tokens)
            self._steps.append(self._executor.launch(step, after_group))
            self._batcher.mark_launched(step)
        count, ready = len(self._steps), self._executor.channel.num_ready
        while self._steps and (len(self._steps) >= self._depth or self._steps[0].number < ready):
            self._process_output(self._steps.popleft())
        return step is not None or len(self._steps) < count

    def synchronize(self) -> None:
        """Waits for all steps in flight and processes their results: afterwards no token is pending."""
        while self._steps:
            self._process_output(self._steps.popleft())


def make_pipeline(batcher: Batcher, executor: Executor | PPExecutor,
                  process_output: Callable[[Launched], None], *, overlap: bool,
                  rate: PrefillRate | None = None) -> Pipeline | PPPipeline:
    """Creates the pipeline for an executor; with pipeline parallelism, PPExecutor decides the overlap."""
    if not isinstance(executor, PPExecutor):
        return Pipeline(batcher, executor, process_output, overlap=overlap, rate=rate)
    return PPPipeline(batcher, executor, process_output, executor.depth, rate)
