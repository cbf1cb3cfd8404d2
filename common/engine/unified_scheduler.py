"""The unified scheduler: both phases in one engine.

It schedules a whole server (``--disaggregation-mode null``), and on a decode server the requests whose KV cache has
arrived.

With ``overlap`` a step is launched before the results of the previous step are processed: the device computes
while the host reports tokens, checks for ends and schedules. A token whose value the host does not know yet is
*pending*; the next step reads it on the device. A request whose last token turns out to be pending has then run one
step too many: that step's token is dropped, and the request's pages are freed only when that step has ended, because
until then it may write into them.

Of a chain step the host does not know how many tokens it gives, nor the next drafts. In flight it counts one token of
each request, and pages are allocated for all that it may give. Another chain step follows it where requests have pages
and no row extras; before any other step that decodes its results are processed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from ..api.drafts import Drafts
from ..api.errors import ServingError
from ..api.messages import Finish, Logprobs
from ..execution.executor import Executor, LaunchedStep
from ..execution.launched import Launched
from ..execution.pp_executor import PPExecutor
from ..execution.pp_pipeline import make_pipeline
from ..forward.forward_batch import AfterGroup
from ..request.input_batch import InputBatch
from ..request.req import Req
from ..request.step_input import StepInput
from ..request.step_output import RowResult, StepOutput, add_prompt_results, picked, row_results
from ..scheduler.batcher import Batcher
from ..scheduler.chain_planner import NoChain, num_verified
from ..scheduler.request_tracker import RequestTracker
from .draft_prefill import DraftPrefill
from .peers import NoPeers


class PromptSender(Protocol):
    """Prompts whose KV caches are sent to other servers as they are computed."""

    def step_tokens(self) -> int | None:
        """Prompt tokens up to which further prompts join a step; None for the default."""

    def before_launch(self, step: StepInput) -> AfterGroup | None:
        """Called before a step is launched; returns what the executor calls after each layer group."""

    def take_in(self, step: StepInput, result: RowResult) -> None:
        """Takes the result of a request with ``sends_kv``, whose prompt ``step`` has computed."""


class UnifiedScheduler:
    """Schedules prompts first, then decode: a step runs prefill chunks while there are any, else one decode step.

    A prompt delays all decoding requests, and is not delayed for their sake: clients that began together then stay
    together, and their next prompts interrupt decode steps once. Rules that wait for more prompts, or for decoding
    requests to end, were simulated (tests/bench/unified_simulation.py): they split such clients into groups that
    interrupt each other (the 99th percentile of intervals at 256 clients is 136 ms, not 18), and with requests at
    random times they delay the first token by the time waited, while as many prompt tokens interrupt as before.

    With ``--enable-mixed-chunk`` every step decodes, and may compute prefill chunks as well.
    """

    def __init__(self, batcher: Batcher, executor: Executor | PPExecutor, tracker: RequestTracker, *, overlap: bool):
        self.batcher = batcher
        self.tracker = tracker
        self._drafting = batcher.drafting
        self._drafts_on_device = batcher.drafting is not None and batcher.drafting.on_device
        self._rate = None if batcher.rates is None else batcher.rates.prefill_rate
        self._draft_prefill: DraftPrefill | None = None
        if self._drafts_on_device and isinstance(executor, Executor) and executor.drafts_from_tokens:
            self._draft_prefill = DraftPrefill(batcher, executor)
        self._pipeline = make_pipeline(batcher, executor, self._process_results, overlap=overlap, rate=self._rate)
        self.prompts: PromptSender | None = None
        """Prompts among the requests whose KV caches are sent to other servers."""

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
        return self.batcher.num_waiting

    num_transferring = 0
    peers = NoPeers()

    @property
    def gauges(self) -> dict[str, float]:
        return {**self.batcher.tier_gauges, **({} if self._drafting is None else self._drafting.stats.gauges)}

    @property
    def counters(self) -> dict[str, float]:
        batcher = self.batcher
        return {"retracted_requests": batcher.retraction.num_retracted,
                "preempted_requests": batcher.retraction.num_preempted,
                "swapped_out_requests": 0 if batcher.swap is None else batcher.swap.num_swapped_out,
                **batcher.tier_counters,
                **({} if self._drafting is None else self._drafting.stats.counters)}

    def add(self, req: Req) -> None:
        self.batcher.prefetch(req, req.prefix_limit)
        self.batcher.enqueue(req)

    def abort(self, req: Req, error: ServingError) -> None:
        """Remove the request, and free its pages. ``synchronize`` must have been called: no step is in flight."""
        assert self._pipeline.in_flight is None
        self.batcher.finish(req)
        self._end_drafting([req])

    def step(self, now: float) -> bool:
        """Launch a batch and process the results of the previous one; False where there was neither."""
        finishes = self._drafts_on_device and self._pipeline.in_flight is not None
        if self._must_finish():
            self.synchronize()  # the drafts that the step ends with are verified next
        if self._draft_prefill is not None:
            self._close_draft_gaps(self._draft_prefill)
        step = self._next_batch(now)
        launched = self._pipeline.advance(
            step, None if step is None or self.prompts is None else self.prompts.before_launch(step))
        if not self._must_finish():  # else the draft model has yet to write into the pages
            self.batcher.flush_stores()
        return launched or finishes

    def _must_finish(self) -> bool:
        """True where a step is in flight whose drafts come at its end, otherwise than in a chain step."""
        in_flight = self._pipeline.in_flight
        if in_flight is None or not self._drafts_on_device:
            return False
        return self.batcher.chains is None or (isinstance(in_flight, LaunchedStep) and in_flight.draft is not None)

    def synchronize(self) -> None:
        """Wait for the step in flight and process its results: afterwards no token is pending."""
        self._pipeline.synchronize()

    def report(self, req: Req, token_ids: list[int], logprobs: Logprobs | None) -> None:
        """Send the new tokens of ``req`` to the API server, and free its pages where they were the last."""
        self._add_output(req, token_ids, logprobs)
        if req.finish is not None:
            self._free([req])

    def _add_output(self, req: Req, token_ids: list[int], logprobs: Logprobs | None, num_drafts: int = 0) -> None:
        if failure := req.failure:
            self.tracker.fail(req, failure)
        else:
            if not req.reported and req.bootstrap is None:
                req.end_span("prefill")
            self.tracker.add_output(req, token_ids, logprobs, num_drafts)

    def _free(self, reqs: Sequence[Req]) -> None:
        """Free the pages of requests that have ended, once no step writes into them any more."""
        in_flight = self._pipeline.in_flight
        writing: set[Req] = set() if in_flight is None else set(reqs).intersection(in_flight.step.sampled_reqs)
        self.batcher.remove([req for req in reqs if req in writing])
        self.batcher.finish_all([req for req in reqs if req not in writing])
        self._end_drafting(reqs)

    def _end_drafting(self, reqs: Sequence[Req]) -> None:
        if self._drafting is not None:
            self._drafting.on_end(reqs)

    def close(self) -> None:
        """There is nothing to close: the process's end frees its memory."""

    def draft_prompt(self, req: Req, start: int) -> None:
        """Let the draft model compute a running request's prompt from token ``start`` on: the model's pages have come
        from elsewhere, without the draft's. The first token is known, and no step has decoded the request."""
        assert self._draft_prefill is not None, "a draft model that reads hidden states has its pages from prefill"
        self._draft_prefill.start(req, start)

    def _close_draft_gaps(self, draft_prefill: DraftPrefill) -> None:
        if draft_prefill.due and not self.paused:
            self.synchronize()
            draft_prefill.advance()
        draft_prefill.on_step()

    def preempt_for(self, req: Req, num_tokens: int, prefix_limit: int) -> None:
        """Retract less urgent requests where ``req`` needs their pages or slots; see PageBudget.reserve."""
        batcher = self.batcher
        if batcher.retraction.should_preempt_for(req, num_tokens, prefix_limit, has_slot=batcher.has_slot):
            self.synchronize()  # a victim's last token must be known; other requests may end by theirs
            batcher.preempt_for(req, num_tokens, prefix_limit)

    def _next_batch(self, now: float) -> StepInput | None:
        batcher = self.batcher
        batcher.poll_loads(now)
        if batcher.paused is not None:
            return None
        if batcher.priorities.enabled and (head := batcher.waiting.peek()) is not None:
            self.preempt_for(head, *batcher.admission.extent(head))
        mixed = batcher.args.enable_mixed_chunk
        limit = None if self.prompts is None else self.prompts.step_tokens()
        if not mixed and (batch := batcher.next_prefill(limit)) is not None:
            return batch
        if batcher.chains is not None and not mixed:
            return self._next_decode()
        if not batcher.allocate_running():
            self.synchronize()
            batcher.retraction.retract_decode()
            if (batch := batcher.next_decode()) is not None:
                return batch
        drafts = self._may_draft()
        return batcher.next_mixed(drafts=drafts) if mixed else batcher.next_decode(drafts=drafts)

    def _next_decode(self) -> StepInput | None:
        """The next decode step, a chain step where that is possible."""
        batcher = self.batcher
        while True:
            if not batcher.allocate_running():
                self.synchronize()
                batcher.retraction.retract_decode()
            in_flight = self._pipeline.in_flight
            if in_flight is not None and in_flight.step.chains is None:
                if not self._may_draft():
                    return batcher.next_decode()
                in_flight = None
            found = batcher.next_chain(None if in_flight is None else in_flight.step)
            if found is NoChain.OTHER:
                return batcher.next_decode(drafts=True)
            if found is not NoChain.WAIT:
                return found
            self.synchronize()

    def _may_draft(self) -> bool:
        """True where the next step may have drafts. The host must know all tokens for it, so it waits for the step in
        flight only where drafts are likely: other steps overlap."""
        if self._drafting is None:
            return False
        if self._pipeline.in_flight is not None:
            if not self._drafting.has_outlook(self.batcher.running):
                return False
            self.synchronize()
        return True

    def _process_results(self, launched: Launched) -> None:
        step, output = launched.step, launched.wait()
        if self._rate is not None:
            self._rate.end()
        if output.extras:
            add_prompt_results(step, output)
        if self._drafts_on_device:
            self._set_drafts(step, output)
        counts = None
        if step.chains is not None and step.input_batch is not None:
            output.num_drafts = num_verified(step.chains, step.input_batch).tolist()
        if step.drafts or step.chains is not None:
            counts = np.array(output.counts, np.int64)
            if self._drafting is not None:
                self._drafting.count(step, output, counts)
        to_check = self._report_continuing(step, output, counts)
        beyond, ended = self._report_others(step, output, to_check) if to_check is None or to_check else ([], [])
        if counts is not None:
            self._mark_verified(step, output, counts, ended)
        if ended:
            self.tracker.flush()  # the last tokens are sent before the pages are freed
            self._free(ended)
        if beyond:
            self._free_beyond(step, beyond)

    def _set_drafts(self, step: StepInput, output: StepOutput) -> None:
        """Set the drafts of requests, but where the step in flight has taken them on the device."""
        if step.chains is None:
            for index in output.req_index:
                step.reqs[index].drafts = output.drafts.get(index)
        elif (in_flight := self._pipeline.in_flight) is None or in_flight.step.chains is None:
            for req, drafts in zip(step.reqs, output.chain_drafts):
                req.drafts = Drafts(tuple(drafts)) if drafts else None

    def _free_beyond(self, step: StepInput, reqs: Sequence[Req]) -> None:
        """Free the pages of requests that ended while ``step`` was in flight."""
        if step.chains is not None:
            self.batcher.queues.invalidate_remaining()
            for req in reqs:  # the row of the last token may have been void
                req.num_computed_tokens = req.tokens.count - 1
        self.batcher.finish_all(reqs)

    def _report_others(self, step: StepInput, output: StepOutput,
                       to_check: list[int] | None) -> tuple[list[Req], list[Req]]:
        """Report the results at the indices ``to_check``, None for all; returns the requests that had ended before, and
        those that end now."""
        beyond, ended = [], []
        for result in row_results(step, output, to_check):
            req = result.req
            if req.sends_kv:
                assert self.prompts is not None
                self.prompts.take_in(step, result)
                continue
            if req.finish is not None:  # it ended with the previous step, and this one's token is beyond its end
                beyond.append(req)
                continue
            if result.error is not None:
                req.finish = Finish("abort")
                self.tracker.fail(req, result.error)
            else:
                token_ids, logprobs = req.append_pending(*result.token_ids), result.logprobs
                if beyond_end := len(result.token_ids) - max(len(token_ids), 1):
                    logprobs = logprobs and picked(logprobs, range(len(token_ids)))
                    if req.hidden is not None:
                        req.hidden.drop_last(beyond_end)
                self._add_output(req, token_ids, logprobs, result.num_drafts)
            if req.finish is not None:
                ended.append(req)
        return beyond, ended

    def _mark_verified(self, step: StepInput, output: StepOutput, counts: np.ndarray, ended: list[Req]) -> None:
        tokens = np.array([*output.tokens, 0], np.int64)  # requests that had ended may have got none
        last_tokens: list[int] = tokens[np.cumsum(counts) - 1].tolist()
        self.batcher.mark_verified(step, counts, last_tokens)
        if ended:  # perhaps within their runs
            self.batcher.queues.invalidate_remaining()
        if self._drafting is not None:
            self._drafting.on_verified(step, output)

    def _report_continuing(self, step: StepInput, output: StepOutput, counts: np.ndarray | None) -> list[int] | None:
        """Report the tokens of the requests in an input batch that merely continue, with drafts ``counts`` [B] of them;
        returns the indices of the other results, None for all."""
        input_batch, tokens = step.input_batch, output.tokens
        if input_batch is None:
            return None
        if counts is not None:
            return self._report_runs(input_batch, output, counts)
        input_batch.record_tokens(tokens)
        to_check = input_batch.rows_to_check(tokens, step.last_step_rows, output.extras)
        if not to_check:
            input_batch.append_tokens(tokens)
            self.tracker.add_new_tokens(input_batch.rids, tokens)
            return to_check
        excluded = set(to_check)
        rows = [row for row in range(len(step)) if row not in excluded]
        if rows:
            continuing = [tokens[row] for row in rows]
            input_batch.append_tokens(continuing, rows)
            self.tracker.add_new_tokens([input_batch.rids[row] for row in rows], continuing)
        return to_check

    def _report_runs(self, input_batch: InputBatch, output: StepOutput, counts: np.ndarray) -> list[int]:
        """``_report_continuing`` of a step with drafts."""
        tokens = output.tokens
        to_check = input_batch.rows_to_check(tokens, input_batch.rows_ending(counts), output.extras, counts)
        excluded = set(to_check)
        ends = np.cumsum(counts).tolist()
        rows = [row for row in range(len(ends)) if row not in excluded]
        runs = [tokens[end - count:end] for end, count in zip(ends, output.counts)]
        if excluded:
            runs = [runs[row] for row in rows]
        input_batch.append_runs(runs, rows)
        if not excluded:
            self.tracker.add_new_tokens(input_batch.rids, tokens, output.counts, output.num_drafts)
        elif rows:
            self.tracker.add_new_tokens([input_batch.rids[row] for row in rows], list(chain.from_iterable(runs)),
                                        list(map(len, runs)), [output.num_drafts[row] for row in rows])
        return to_check
