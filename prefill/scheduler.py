"""The prefill server's scheduler.

A request waits for decode to name its destination (meeting), is computed chunk by chunk while finished pages leave for
decode (computing), and ends when the last write and the first token have arrived (sending). Its pages then stay in the
prefix cache. Until a transfer has settled, its pages are held: a write may still be reading them. Where decode dies
before it goes on with a request, another attempt finds what was computed (kept.py).
"""

from __future__ import annotations

from collections.abc import Callable

from ..common.api.errors import AbortRequested, InvalidRequest, ServingError
from ..common.api.messages import Finish, Logprobs
from ..common.config.server.disaggregation import TransferOverlap
from ..common.distributed.agreement import Agreeing
from ..common.execution.executor import Executor, StepOutput
from ..common.execution.pp_executor import PPExecutor, PPStep
from ..common.execution.pp_pipeline import pipeline_of
from ..common.request.req import Req
from ..common.scheduler.batcher import Batcher
from ..common.scheduler.request_tracker import RequestTracker
from ..kvtransfer.protocol.messages import PrefillResult, RankInfo
from ..kvtransfer.protocol.states import Phase
from ..kvtransfer.requests import Progress, TransferRequest, TransferStatus, TransferTable
from ..kvtransfer.sender.kv_sender import KVSender
from .kv_push import KVPush
from .peers import DecodePeers
from .retained_prompts import RetainedPrompts
from .step_size import most_together


class PrefillScheduler:
    """Computes prompts and pushes their pages to the decode server that each request's room leads to."""

    def __init__(self, batcher: Batcher, executor: Executor | PPExecutor, tracker: RequestTracker, sender: KVSender,
                 group: Agreeing, num_groups: int, *, register: Callable[[RankInfo], None], overlap: bool,
                 kv_retain_seconds: float, transfer_overlap: TransferOverlap = "layers"):
        self.batcher = batcher
        self.executor = executor
        self.tracker = tracker
        self.sender = sender
        self.rooms = TransferTable(sender, group)
        self._departures = KVPush(sender, batcher.cache, num_groups, transfer_overlap, lambda: executor.event())
        self._pipeline = pipeline_of(batcher, executor, self._take_in, overlap=overlap)
        self._first_tokens: dict[int, tuple[list[int], Logprobs | None]] = {}  # by room
        self._kept = RetainedPrompts(batcher.cache, sender, group, kv_retain_seconds)
        self.peers = DecodePeers(sender, self._kept, register)
        self._now = 0.0

    @property
    def idle(self) -> bool:
        return self.batcher.idle and not len(self.rooms) and self._pipeline.in_flight is None

    @property
    def paused(self) -> bool:
        return self.batcher.paused is not None

    @property
    def num_running(self) -> int:
        return len(self.batcher.prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self.batcher.waiting) + self.rooms.count(TransferStatus.MEETING)

    @property
    def num_transferring(self) -> int:
        return self.rooms.count(TransferStatus.SENDING) + self.rooms.count(TransferStatus.DRAINING)

    @property
    def counters(self) -> dict[str, float]:
        return {**self.sender.counters, "reused_prompts": self._kept.num_reused}

    @property
    def gauges(self) -> dict[str, float]:
        queued, in_flight = self.sender.writes_waiting
        return {"kv_transfers_bootstrapping": self.rooms.count(TransferStatus.MEETING),
                "kv_transfers_in_flight": self.rooms.count(TransferStatus.SENDING),
                "kv_transfers_draining": self.rooms.count(TransferStatus.DRAINING),
                "kv_writes_queued": queued, "kv_writes_in_flight": in_flight, "kv_prompts_retained": len(self._kept)}

    def add(self, req: Req) -> None:
        if req.bootstrap is None:
            raise InvalidRequest(
                "A prefill server needs bootstrap_host, bootstrap_port and bootstrap_room; send to the router instead.",
                param="bootstrap_room")
        self.sender.expect(req.bootstrap.room, req.prompt_digest, req.num_prompt_tokens)
        self._kept.drop(req.bootstrap.room)
        self.rooms.open(req, TransferStatus.MEETING)

    def abort(self, req: Req, error: ServingError) -> None:
        half = self.rooms.of(req)
        assert half is not None
        self.batcher.remove([req])
        self.rooms.abort(half, error)
        # A client that left may be the router, which tries again with another decode server.
        self._kept.failed(half.room, self._now, wanted=not isinstance(error, AbortRequested))

    def step(self, now: float) -> bool:
        self._now = now
        self._kept.sweep(now)
        for progress in self.rooms.poll():
            self._advance(progress)
        batch = None if self.paused else self.batcher.next_prefill(most_together(self.batcher))
        if batch is None:
            return self._pipeline.advance(None)
        self._departures.cached(batch)
        return self._pipeline.advance(batch, self._departures.of(batch))

    def synchronize(self) -> None:
        self._pipeline.synchronize()

    def close(self) -> None:
        self.sender.close()

    # -- life of a half --------------------------------------------------------------------------

    def _advance(self, progress: Progress) -> None:
        half = progress.half
        if half.stage is TransferStatus.DRAINING:
            if progress.settled:
                self._let_go(half)
        elif progress.failing:
            error = self.rooms.error_of(half)
            self.abort(half.req, error)
            self._kept.failed(half.room, self._now, wanted=not progress.aborted)
            self.tracker.fail(half.req, error)
        elif half.stage is TransferStatus.MEETING and progress.phase >= Phase.RESERVED:
            half.req.end_span("meeting")
            self._begin(half)
        elif half.stage is TransferStatus.SENDING and progress.settled:
            token_ids, logprobs = self._first_tokens[half.room]
            self._let_go(half)
            self.tracker.add_output(half.req, token_ids, logprobs)

    def _begin(self, half: TransferRequest) -> None:
        """Both halves have met: compute the prompt, or send what an attempt before this one has computed."""
        half.stage = TransferStatus.COMPUTING
        req = half.req
        if (result := self._kept.reuse(req)) is None:
            self.batcher.waiting.append(req)
            return
        assert req.page_table is not None
        req.num_computed_tokens = req.num_cached_tokens = req.num_prompt_tokens
        req.prompt_logprobs = result.prompt_logprobs
        self._departures.computed_before(half.room, req.page_table.ids.copy())
        self._hand_over(half, req.append_token(result.token_id), result)

    def _take_in(self, step: StepOutput | PPStep) -> None:
        for gain in step.gains():
            half = self.rooms.of(gain.req)
            if half is not None and half.stage is TransferStatus.COMPUTING and gain.error is not None:
                self.abort(gain.req, gain.error)
                self.tracker.fail(gain.req, gain.error)
            elif half is not None and half.stage is TransferStatus.COMPUTING:
                self.batcher.remove([gain.req])
                req = gain.req
                hidden = None if req.hidden is None else req.hidden.take()
                self._hand_over(half, req.append_pending(gain.token_id), PrefillResult(
                    gain.token_id, req.num_cached_tokens, gain.logprobs, req.prompt_logprobs, hidden))

    def _hand_over(self, half: TransferRequest, token_ids: list[int], result: PrefillResult) -> None:
        """The prompt is computed: the first token follows its pages."""
        req = half.req
        half.stage = TransferStatus.SENDING
        req.end_span("prefill")
        self._first_tokens[half.room] = (token_ids, result.logprobs)
        req.finish = req.finish or Finish("length")
        self._kept.add(half.room, req, result)
        self.sender.finish(half.room, result)

    def _let_go(self, half: TransferRequest) -> None:
        """No write can touch the pages any more: what was computed stays in the prefix cache."""
        self._first_tokens.pop(half.room, None)
        if half.stage is TransferStatus.SENDING:
            self.rooms.close(half, forget=lambda room: self._kept.done(room, self._now))
        else:
            self.rooms.close(half)
        self.batcher.finish(half.req)
