"""The executor of one pipeline stage: computes its layers, on the last stage also the LM head and samples."""

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
from .pp_channel import PPChannel, PPStepResult, PPToken, Reporter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PPStep:
    """A batch that was launched on this stage. Its results come from the last stage."""

    number: int
    batch: ScheduledBatch
    sampled_reqs: list[Req]
    channel: PPChannel

    def plain_token_ids(self) -> None:
        """Returns None: all results come from ``new_tokens``."""

    def new_tokens(self) -> list[NewToken]:
        """Waits for the step; returns a token for each chunk that reached its request's end, in batch order."""
        result = self.channel.result(self.number)
        for chunk, logprobs in result.prompts:
            _extend(self.batch.chunks[chunk].req, logprobs)
        return [NewToken(req, token.token_id, token.logprobs,
                         None if token.code is None else from_code(token.code, token.message))
                for req, token in zip(self.sampled_reqs, result.tokens)]


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

    def launch(self, batch: ScheduledBatch, after_group: AfterGroup | None = None) -> PPStep:
        """Starts computing the batch; on a CPU this stage has computed it. No token of it may be pending."""
        number = next(self._numbers)
        sampled_reqs = [chunk.req for chunk in batch.chunks if batch.is_decode or chunk.samples]
        if not self.pp.is_last:
            prompt_rows(batch)  # initialises the same prompt log-probabilities as the last stage
            self._executor.forward(batch, after_group)
        else:
            step = self._executor.launch(batch, after_group)
            if self._result_sender is not None:
                self._result_sender.put(number, step)
            elif self._sends_results:
                self.channel.report(_result_of(number, step))
        return PPStep(number, batch, sampled_reqs, self.channel)

    def run_idle_batch(self) -> None:
        """Does nothing: without a batch no stage computes."""

    def event(self) -> torch.cuda.Event | None:
        return self._executor.event()


class _ResultSender:
    """Sends results as soon as the device has them, in a thread, whatever the rank's loop is doing."""

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        self._steps: queue.SimpleQueue[tuple[int, StepOutput]] = queue.SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="stage-results", daemon=True).start()

    def put(self, number: int, step: StepOutput) -> None:
        """Sends a step's results when they are there; raises the error of an earlier step."""
        if self._error is not None:
            raise self._error
        self._steps.put((number, step))

    def _run(self) -> None:
        while True:
            number, step = self._steps.get()
            try:
                self._reporter.send(_result_of(number, step))
            except Exception as error:  # a device that failed: ``put`` raises it in the rank's loop
                self._error = error
                return


def _result_of(number: int, step: StepOutput) -> PPStepResult:
    """Waits for a step's results, and encodes them; the requests are not changed."""
    sampled = step.sampled.wait()
    tokens = []
    for i, (token_id, logprob) in enumerate(zip(sampled.token_ids, sampled.logprobs)):
        logprobs = logprob and Logprobs([token_id], [logprob.value], [logprob.top], [logprob.of_ids])
        token = PPToken(token_id, logprobs)
        if token_id == FAILED:
            error = InvalidRequest(sampled.failures.get(i, "custom_logit_processor failed."))
            token.code, token.message = error.wire_code, error.message
        tokens.append(token)
    return PPStepResult(number, tokens, _prompt_logprobs(step))


def _prompt_logprobs(step: StepOutput) -> list[tuple[int, Logprobs]]:
    """Returns the step's prompt log-probabilities, by the index of their chunk."""
    if step.prompt_report is None:
        return []
    chunk_of = {chunk.req: index for index, chunk in enumerate(step.batch.chunks)}
    prompts: dict[int, Logprobs] = {}
    for row, token_id, logprob in step.prompt_report.wait():
        append(prompts.setdefault(chunk_of[row.req], Logprobs([], [], [], [])), token_id, logprob)
    return list(prompts.items())


def _extend(req: Req, more: Logprobs) -> None:
    logprobs = begin(req)
    logprobs.token_ids.extend(more.token_ids)
    logprobs.values.extend(more.values)
    logprobs.top.extend(more.top)
    logprobs.of_ids.extend(more.of_ids)
