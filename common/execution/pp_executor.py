"""The executor of one pipeline stage: computes its layers, on the last stage also the LM head and samples."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from ..distributed.parallel import Parallel
from ..forward.forward_batch import AfterGroup
from ..request.step_input import StepInput
from ..request.step_output import StepOutput
from ..sampling.extras.prompt_logprobs import prompt_rows
from .executor import Executor
from .launched import Launched
from .pp_channel import PPChannel, PPStepResult, Reporter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PPStep:
    """A step that was launched on this stage. Its results come from the last stage."""

    number: int
    step: StepInput
    channel: PPChannel

    def wait(self) -> StepOutput:
        """Waits for the step, at the same position between other records on every rank."""
        return self.channel.result(self.number).output


class PPExecutor:
    """Executor's ``launch`` with pipeline parallelism. The ranks of all stages launch the same batches in the same
    order.
    """

    def __init__(self, executor: Executor, channel: PPChannel, parallel: Parallel, *, one_step: bool = False):
        """``one_step``: one step in flight at a time."""
        self._executor = executor
        self._one_step = one_step
        self.pp = parallel.pp
        self.channel = channel
        self._numbers = count()
        self._result_sender: _ResultSender | None = None
        self._sends_results = parallel.pp.is_last and parallel.attn_tp.rank == 0
        if self._sends_results and executor.asynchronous:
            self._result_sender = _ResultSender(channel.reporter("results"))

    @property
    def asynchronous(self) -> bool:
        return self._executor.asynchronous

    @property
    def depth(self) -> int:
        """Steps in flight that keep every stage busy: one each, and another one where the host runs ahead."""
        return 1 if self._one_step else self.pp.size + self.asynchronous

    def launch(self, step: StepInput, after_group: AfterGroup | None = None) -> PPStep:
        """Starts computing a step; on a CPU this stage has computed it. No token of it may be pending."""
        number = next(self._numbers)
        if not self.pp.is_last:
            prompt_rows(step)  # initialises the same prompt log-probabilities as the last stage
            self._executor.forward(step, after_group)
        else:
            launched = self._executor.launch(step, after_group)
            if self._result_sender is not None:
                self._result_sender.put(number, launched)
            elif self._sends_results:
                self.channel.report(PPStepResult(number, launched.wait()))
        return PPStep(number, step, self.channel)

    def run_idle_batch(self) -> None:
        """Does nothing: without a batch no stage computes."""

    def event(self) -> torch.cuda.Event | None:
        return self._executor.event()


class _ResultSender:
    """Sends results as soon as the device has them, in a thread, whatever the rank's loop is doing."""

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        self._steps: queue.SimpleQueue[tuple[int, Launched]] = queue.SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="stage-results", daemon=True).start()

    def put(self, number: int, step: Launched) -> None:
        """Sends a step's results when they are there; raises the error of an earlier step."""
        if self._error is not None:
            raise self._error
        self._steps.put((number, step))

    def _run(self) -> None:
        while True:
            number, step = self._steps.get()
            try:
                self._reporter.send(PPStepResult(number, step.wait()))
            except Exception as error:  # a device that failed: ``put`` raises it in the rank's loop
                self._error = error
                return
