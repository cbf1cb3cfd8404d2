"""Runs batches on one stage of a pipeline: its layers, and on the last one the head and the sampler."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from ..api.errors import InvalidRequest, from_code
from ..api.messages import Logprobs
from ..distributed.parallel import Parallel
from ..forward.forward_batch import AfterGroup
from ..request.batch import ScheduledBatch
from ..request.req import Req
from ..request.sampling_metadata import FAILED
from ..sampling.prompt_logprobs import append, begin, prompt_rows
from .executor import Executor, NewToken, StepOutput
from .pp_channel import Computed, PPChannel, PPStepResult, Reporter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PPStep:
    """A batch that was launched on this stage. Its results come from the last stage."""

    number: int
    batch: ScheduledBatch
    sampling: list[Req]
    line: PPChannel

    def plain_tokens(self) -> None:
        """What has become of each request is told by ``gains``."""

    def gains(self) -> list[NewToken]:
        """Wait for the step; a gain for each chunk that reached its request's end, in batch order."""
        told = self.line.result(self.number)
        for place, found in told.prompts:
            _extend(self.batch.chunks[place].req, found)
        return [NewToken(req, gain.token_id, gain.logprobs,
                         None if gain.code is None else from_code(gain.code, gain.message))
                for req, gain in zip(self.sampling, told.gains)]


class PPExecutor:
    """Executor's ``launch``, over stages. The ranks of all stages launch the same batches in the same order."""

    def __init__(self, executor: Executor, line: PPChannel, parallel: Parallel, *, alone: bool = False):
        """``alone``: one step at a time."""
        self._executor = executor
        self._alone = alone
        self._stages = parallel.stages
        self.line = line
        self._numbers = count()
        self._teller: _Teller | None = None
        self._reports = parallel.stages.last and parallel.attention.rank == 0
        if self._reports and executor.asynchronous:
            self._teller = _Teller(line.reporter("results"))

    @property
    def asynchronous(self) -> bool:
        return self._executor.asynchronous

    @property
    def depth(self) -> int:
        """Steps on their way that keep every stage at work: one each, and where the host runs ahead one in hand."""
        return 1 if self._alone else self._stages.size + self.asynchronous

    def launch(self, batch: ScheduledBatch, after_group: AfterGroup | None = None) -> PPStep:
        """Start computing the batch; on a CPU this stage has computed it. No token of it may be pending."""
        number = next(self._numbers)
        sampling = [chunk.req for chunk in batch.chunks if batch.is_decode or chunk.samples]
        if not self._stages.last:
            prompt_rows(batch)  # begins what the last stage begins
            self._executor.forward(batch, after_group)
        else:
            step = self._executor.launch(batch, after_group)
            if self._teller is not None:
                self._teller.put(number, step)
            elif self._reports:
                self.line.report(_told(number, step))
        return PPStep(number, batch, sampling, self.line)

    def accompany(self) -> None:
        """Without a batch no stage does anything."""

    def event(self) -> torch.cuda.Event | None:
        return self._executor.event()


class _Teller:
    """Reports results as soon as the device has them, whatever the rank's loop is doing."""

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        self._steps: queue.SimpleQueue[tuple[int, StepOutput]] = queue.SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="stage-results", daemon=True).start()

    def put(self, number: int, step: StepOutput) -> None:
        """Raises what went wrong with a step before."""
        if self._error is not None:
            raise self._error
        self._steps.put((number, step))

    def _run(self) -> None:
        while True:
            number, step = self._steps.get()
            try:
                self._reporter.send(_told(number, step))
            except Exception as error:  # a device that failed: the rank's loop is to end by it
                self._error = error
                return


def _told(number: int, step: StepOutput) -> Computed:
    """Wait for a step's results; the requests are not touched."""
    sampled = step.sampled.wait()
    gains = []
    for i, (token_id, found) in enumerate(zip(sampled.token_ids, sampled.logprobs)):
        logprobs = found and Logprobs([token_id], [found.value], [found.top], [found.of_ids])
        gain = PPStepResult(token_id, logprobs)
        if token_id == FAILED:
            error = InvalidRequest(sampled.failures.get(i, "custom_logit_processor failed."))
            gain.code, gain.message = error.wire_code, error.message
        gains.append(gain)
    return Computed(number, gains, _prompts(step))


def _prompts(step: StepOutput) -> list[tuple[int, Logprobs]]:
    if step.prompt_report is None:
        return []
    places = {chunk.req: place for place, chunk in enumerate(step.batch.chunks)}
    told: dict[int, Logprobs] = {}
    for row, token_id, found in step.prompt_report.found():
        append(told.setdefault(places[row.req], Logprobs([], [], [], [])), token_id, found)
    return list(told.items())


def _extend(req: Req, found: Logprobs) -> None:
    kept = begin(req)
    kept.token_ids.extend(found.token_ids)
    kept.values.extend(found.values)
    kept.top.extend(found.top)
    kept.of_ids.extend(found.of_ids)
