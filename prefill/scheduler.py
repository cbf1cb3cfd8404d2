"""The prefill server's scheduler.

A request waits for decode to name its destination (BOOTSTRAPPING), is computed chunk by chunk while finished pages are
pushed to decode (COMPUTING), and ends when the last write and the first token have arrived (SENDING). Its pages then
stay in the prefix cache. Until a transfer has settled, its pages stay allocated: a write may still be reading them.
Where decode dies before it acknowledges the first token, another attempt finds the computed prompt
(retained_prompts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..common.api.errors import AbortRequested, InvalidRequest, ServingError
from ..common.api.messages import Finish, Logprobs
from ..common.config.server.disaggregation import TransferOverlap
from ..common.distributed.agreement import RankAgreement
from ..common.execution.executor import Executor
from ..common.execution.launched import Launched
from ..common.execution.pp_executor import PPExecutor
from ..common.execution.pp_pipeline import make_pipeline
from ..common.request.req import Req
from ..common.request.step_output import add_prompt_results, row_results
from ..common.scheduler.batcher import Batcher
from ..common.scheduler.request_tracker import RequestTracker
from ..kvtransfer.protocol.messages import PrefillResult, RankInfo
from ..kvtransfer.protocol.states import Phase
from ..kvtransfer.requests import Progress, TransferRequest, TransferStatus, TransferTable
from ..kvtransfer.sender.kv_sender import KVSender
from .kv_push import KVPush
from .peers import DecodePeers
from .retained_prompts import RetainedPrompts
from .step_size import step_tokens


class PrefillScheduler:
    """Computes prompts and pushes their pages to the decode server that reserved pages for each request's room."""

    def __init__(self, batcher: Batcher, executor: Executor | PPExecutor, tracker: RequestTracker, sender: KVSender,
                 group: RankAgreement, layer_groups: Sequence[int], *, register: Callable[[RankInfo], None],
                 overlap: bool, kv_retain_seconds: float, transfer_overlap: TransferOverlap = "layers",
                 draft_groups: int = 0):
        """``layer_groups`` of each cache group, and ``draft_groups`` of the draft's pool: see KVPush."""
        self.batcher = batcher
        self.executor = executor
        self.tracker = tracker
        self.sender = sender
        self.transfers = TransferTable(sender, group)
        self._kv_push = KVPush(sender, batcher.cache, layer_groups, transfer_overlap, lambda: executor.event(),
                               draft_groups)
        self._rate = None if batcher.rates is None else batcher.rates.prefill_rate
        self._pipeline = make_pipeline(batcher, executor, self._take_in, overlap=overlap, rate=self._rate)
        self._first_tokens: dict[int, tuple[list[int], Logprobs | None]] = {}  # by room
        self._retained = RetainedPrompts(batcher.cache, sender, group, kv_retain_seconds)
        self.peers = DecodePeers(sender, self._retained, register)
        self._now = 0.0

    @property
    def idle(self) -> bool:
        return self.batcher.idle and not len(self.transfers) and self._pipeline.in_flight is None

    @property
    def paused(self) -> bool:
        return self.batcher.paused is not None

    @property
    def num_running(self) -> int:
        return len(self.batcher.prefilling)

    @property
    def num_waiting(self) -> int:
        return self.batcher.num_waiting + self.transfers.count(TransferStatus.BOOTSTRAPPING)

    @property
    def num_transferring(self) -> int:
        return self.transfers.count(TransferStatus.SENDING) + self.transfers.count(TransferStatus.DRAINING)

    @property
    def counters(self) -> dict[str, float]:
        return {**self.sender.counters, **self.batcher.tier_counters, "reused_prompts": self._retained.num_reused}

    @property
    def gauges(self) -> dict[str, float]:
        queued, in_flight = self.sender.writes_waiting
        return {"kv_transfers_bootstrapping": self.transfers.count(TransferStatus.BOOTSTRAPPING),
                "kv_transfers_in_flight": self.transfers.count(TransferStatus.SENDING),
                "kv_transfers_draining": self.transfers.count(TransferStatus.DRAINING),
                "kv_writes_queued": queued, "kv_writes_in_flight": in_flight,
                "kv_prompts_retained": len(self._retained), **self.batcher.tier_gauges}

    def add(self, req: Req) -> None:
        if req.bootstrap is None:
            raise InvalidRequest(
                "A prefill server needs bootstrap_host, bootstrap_port and bootstrap_room; send to the router instead.",
                param="bootstrap_room")
        self.sender.expect(req.bootstrap.room, req.prompt_digest, req.num_prompt_tokens)
        self._retained.drop(req.bootstrap.room)
        self.transfers.open(req, TransferStatus.BOOTSTRAPPING)
        self.batcher.prefetch(req, req.prefix_limit)

    def abort(self, req: Req, error: ServingError) -> None:
        transfer = self.transfers.find(req)
        assert transfer is not None
        self.batcher.remove([req])
        self.transfers.abort(transfer, error)
        # The client that disconnected may be the router, which tries again with another decode server.
        self._retained.on_failed(transfer.room, self._now, may_retry=not isinstance(error, AbortRequested))

    def step(self, now: float) -> bool:
        self._now = now
        self._retained.sweep(now)
        for progress in self.transfers.poll():
            self._advance(progress)
        self.batcher.poll_loads(now)
        batch = None if self.paused else self.batcher.next_prefill(step_tokens(self.batcher))
        if batch is not None:
            self._kv_push.push_cached(batch)
        launched = self._pipeline.advance(batch, None if batch is None else self._kv_push.callback_for(batch))
        self.batcher.flush_stores()
        return launched

    def synchronize(self) -> None:
        self._pipeline.synchronize()

    def close(self) -> None:
        self.sender.close()

    # -- life of a transfer ----------------------------------------------------------------------

    def _advance(self, progress: Progress) -> None:
        transfer = progress.transfer
        if transfer.status is TransferStatus.DRAINING:
            if progress.settled:
                self._release(transfer)
        elif progress.failing:
            error = self.transfers.error_for(transfer)
            self.abort(transfer.req, error)
            self._retained.on_failed(transfer.room, self._now, may_retry=not progress.aborted)
            self.tracker.fail(transfer.req, error)
        elif transfer.status is TransferStatus.BOOTSTRAPPING and progress.phase >= Phase.RESERVED:
            transfer.req.end_span("meeting")
            self._begin(transfer)
        elif transfer.status is TransferStatus.SENDING and progress.settled:
            token_ids, logprobs = self._first_tokens[transfer.room]
            self._release(transfer)
            self.tracker.add_output(transfer.req, token_ids, logprobs)

    def _begin(self, transfer: TransferRequest) -> None:
        """Computes the prompt of a transfer whose ranks are all RESERVED, or sends what an earlier attempt has
        computed."""
        transfer.advance(TransferStatus.COMPUTING)
        req = transfer.req
        if (result := self._retained.reuse(req)) is None:
            self.batcher.enqueue(req)
            return
        self.batcher.remove([req])  # its prefetch
        assert req.page_table is not None
        req.num_computed_tokens = req.num_cached_tokens = req.num_prompt_tokens
        req.prompt_logprobs = result.prompt_logprobs
        self._kv_push.push_retained(req)
        self._hand_over(transfer, req.append_token(result.token_id), result)

    def _take_in(self, launched: Launched) -> None:
        step, output = launched.step, launched.wait()
        if self._rate is not None:
            self._rate.end()
        add_prompt_results(step, output)
        for req, token_ids, logprobs, error, drafts, _ in row_results(step, output):
            transfer = self.transfers.find(req)
            if transfer is None or transfer.status is not TransferStatus.COMPUTING:
                continue
            if error is not None:
                self.abort(req, error)
                self.tracker.fail(req, error)
                continue
            self.batcher.remove([req])
            if step.draft_limits:
                assert req.page_table is not None
                self.batcher.cache.trim(req.page_table, req.num_prompt_tokens)
            hidden = None if req.hidden is None else req.hidden.take()
            self._hand_over(transfer, req.append_pending(*token_ids), PrefillResult(
                token_ids[0], req.num_cached_tokens, logprobs, req.prompt_logprobs, hidden, drafts, req.loaded))

    def _hand_over(self, transfer: TransferRequest, token_ids: list[int], result: PrefillResult) -> None:
        """Sends the first token after the pages of a computed prompt."""
        req = transfer.req
        transfer.advance(TransferStatus.SENDING)
        req.end_span("prefill")
        self._first_tokens[transfer.room] = (token_ids, result.logprobs)
        req.finish = req.finish or Finish("length")
        self._retained.add(transfer.room, req, result)
        self.sender.finish(transfer.room, result)

    def _release(self, transfer: TransferRequest) -> None:
        """Ends a transfer whose pages no write can touch any more; its computed pages stay in the prefix cache."""
        self._first_tokens.pop(transfer.room, None)
        if transfer.status is TransferStatus.SENDING:
            self.transfers.close(transfer, forget=lambda room: self._retained.on_done(room, self._now))
        else:
            self.transfers.close(transfer)
        self.batcher.finish(transfer.req)
