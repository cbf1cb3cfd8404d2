"""The unified scheduler: both phases in one engine.

It is a whole server's scheduler (``--disaggregation-mode null``) and the part of a decode server that runs
what has arrived.

With ``overlap`` a step is launched before the results of the step before it are taken in: the device computes
while the host reports tokens, checks for ends and schedules. A token whose value the host does not know yet is
*pending*; the next step reads it on the device. A request whose last token turns out to be pending has then run one
step too many: that step's token is dropped, and the request's pages are freed only when that step has ended, for
until then it may write into them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..api.errors import ServingError
from ..api.messages import Finish, Logprobs
from ..execution.executor import Executor, NewToken, StepOutput
from ..execution.pp_executor import PPExecutor, PPStep
from ..execution.pp_pipeline import pipeline_of
from ..request.batch import ScheduledBatch
from ..request.req import Req
from ..scheduler.batcher import Batcher
from ..scheduler.request_tracker import RequestTracker
from .peers import NoPeers


class UnifiedScheduler:
    """Prompts first, then decode: a step runs prefill chunks while there are any, else one decode step.

    A prompt holds up all that decode, and is not held back for their sake: clients that began together then stay
    together, and their next prompts come between decode steps once. Rules that wait until more prompts have come, or
    until those that decode have ended, were simulated (tests/bench/unified_simulation.py): they pull such clients
    apart into groups that interrupt each other (the 99th percentile of intervals at 256 clients 136 ms, not 18), and
    with requests at random times the first token comes later by what was waited for, while as many tokens of prompts
    interrupt as before.

    With ``--enable-mixed-chunk`` every step decodes, and prefill chunks are computed beside that.
    """

    def __init__(self, batcher: Batcher, executor: Executor | PPExecutor, ledger: RequestTracker, *, overlap: bool):
        self.batcher = batcher
        self.ledger = ledger
        self._rate = None if batcher.swap is None else batcher.swap.prefill_rate
        self._pipeline = pipeline_of(batcher, executor, self._take_in, overlap=overlap, rate=self._rate)

    @property
    def idle(self) -> bool:
        return self.batcher.idle and self._pipeline.in_flight is None

    @property
    def paused(self) -> bool:
        return self.batcher.paused is not None

    @property
    def num_running(self) -> int:
        return len(self.batcher.running) + len(self.batcher.prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self.batcher.waiting)

    num_transferring = 0
    peers = NoPeers()

    @property
    def gauges(self) -> dict[str, float]:
        return {}

    @property
    def counters(self) -> dict[str, float]:
        batcher = self.batcher
        saved = 0 if batcher.swap is None else batcher.swap.num_saved
        return {"retracted_requests": batcher.num_retracted, "preempted_requests": batcher.num_preempted,
                "swapped_out_requests": saved}

    def add(self, req: Req) -> None:
        self.batcher.waiting.append(req)

    def abort(self, req: Req, error: ServingError) -> None:
        """Take the request out, and free its pages. ``settle`` was called before: no step is in flight."""
        assert self._pipeline.in_flight is None
        self.batcher.finish(req)

    def step(self, now: float) -> bool:
        """Launch a batch and take in the results of the one before; False where there was neither."""
        return self._pipeline.advance(self._next_batch())

    def settle(self) -> None:
        """Wait for the step in flight and take in its results: afterwards no token is pending."""
        self._pipeline.settle()

    def report(self, req: Req, token_ids: list[int], logprobs: Logprobs | None) -> None:
        """Tell the front of tokens that ``req`` has gained, and free it where they were the last."""
        self._tell(req, token_ids, logprobs)
        if req.finish is not None:
            self._free([req])

    def _tell(self, req: Req, token_ids: list[int], logprobs: Logprobs | None) -> None:
        if failure := req.failure:
            self.ledger.fail(req, failure)
        else:
            if not req.reported and req.bootstrap is None:
                req.mark("prefill")
            self.ledger.gain(req, token_ids, logprobs)

    def _free(self, reqs: Sequence[Req]) -> None:
        """The requests have ended: their pages are free when no step writes into them any more."""
        in_flight = self._pipeline.in_flight
        writing: set[Req] = set() if in_flight is None else set(reqs).intersection(in_flight.sampling)
        self.batcher.detach([req for req in reqs if req in writing])
        self.batcher.finish_each([req for req in reqs if req not in writing])

    def close(self) -> None:
        """Nothing to let go of beside the process's memory."""

    def make_way(self, req: Req, num_tokens: int, prefix_limit: int) -> None:
        """Retract less urgent requests where ``req`` needs their room; see Batcher.reserve."""
        if self.batcher.blocked(req, num_tokens, prefix_limit):
            self.settle()  # a request to retract must know its last token; others may end by it
            self.batcher.make_way(req, num_tokens, prefix_limit)

    def _next_batch(self) -> ScheduledBatch | None:
        batcher = self.batcher
        if batcher.paused is not None:
            return None
        if batcher.priorities.enabled and (head := batcher.waiting.head()) is not None:
            self.make_way(head, len(head.tokens), head.prefix_limit)
        mixed = batcher.args.enable_mixed_chunk
        if not mixed and (batch := batcher.next_prefill()) is not None:
            return batch
        if not batcher.grow_running():
            self.settle()
            batcher.retract_for_room()
            if (batch := batcher.next_decode()) is not None:
                return batch
        return batcher.next_mixed() if mixed else batcher.next_decode()

    def _take_in(self, step: StepOutput | PPStep) -> None:
        if (token_ids := step.plain_tokens()) is not None:
            gains = self._take_in_plain(step, token_ids)
        else:
            gains = step.gains()
        if self._rate is not None:
            self._rate.end()
        beyond, ended = [], []
        for gain in gains:
            req = gain.req
            if req.finish is not None:  # it ended with the step before, and this one's token is beyond its end
                beyond.append(req)
                continue
            if gain.error is not None:
                req.finish = Finish("abort")
                self.ledger.fail(req, gain.error)
            else:
                self._tell(req, req.take_pending(gain.token_id), gain.logprobs)
            if req.finish is not None:
                ended.append(req)
        if ended:
            self.ledger.flush()  # who waits for the last tokens need not wait until their pages are free
            self._free(ended)
        if beyond:
            self.batcher.finish_each(beyond)

    def _take_in_plain(self, step: StepOutput | PPStep, token_ids: list[int]) -> list[NewToken]:
        """Take in the tokens of a run's requests that go on with them; the gains of the others."""
        run, reqs, positions = step.batch.run, step.sampling, step.batch.positions
        assert run is not None and positions is not None
        run.took(token_ids)
        watched = run.watched(token_ids, step.batch.ending)
        if not watched:
            self.ledger.gain_each(reqs, run.gained(token_ids, positions))
            return []
        apart = set(watched)
        going = [place for place in range(len(reqs)) if place not in apart]
        if going:
            self.ledger.gain_each([reqs[place] for place in going], run.gained(token_ids, positions, going))
        return [NewToken(reqs[place], token_ids[place], None) for place in watched]
