"""The decode server's scheduler.

A request first reserves the pages that its own prefix cache lacks, sends their ids to the prefill server, and joins the
running batch when the KV cache and the first token have arrived. Memory is thus committed at the receiver before
anything is written. The composed unified scheduler runs the batch; it also computes prompts that come without a
bootstrap room, and requests that were retracted.
"""

from __future__ import annotations

from ..common.api.drafts import Drafts
from ..common.api.errors import ServingError, TransferFailed
from ..common.distributed.agreement import RankAgreement
from ..common.engine.unified_scheduler import UnifiedScheduler
from ..common.request.req import Req
from ..common.scheduler.page_budget import QueueAdmission
from ..kvtransfer.protocol.states import Phase
from ..kvtransfer.receiver.kv_receiver import KVReceiver
from ..kvtransfer.requests import Progress, TransferRequest, TransferStatus, TransferTable
from .peers import PrefillPeers


class DecodeScheduler:
    """Reserves pages, receives KV caches and decodes."""

    def __init__(self, unified: UnifiedScheduler, receiver: KVReceiver, group: RankAgreement, *,
                 scrubs_failed: bool = False):
        """``scrubs_failed``: zero the pages of transfers that fail or are aborted, because prefill sends a layer's keys
        and values before it knows whether they are finite."""
        self._scrubs_failed = scrubs_failed
        self.unified = unified
        self.batcher = unified.batcher
        self.tracker = unified.tracker
        self.receiver = receiver
        self.transfers = TransferTable(receiver, group)
        self.peers = PrefillPeers(receiver)
        self.arrived = self.batcher.make_queue()
        self._admission = QueueAdmission(self.batcher.page_budget, incoming=True)
        self._new: list[Req] = []  # of the arrived ones
        self._started: list[TransferRequest] = []  # in this step

    @property
    def idle(self) -> bool:
        return self.unified.idle and not self.arrived and not len(self.transfers)

    @property
    def paused(self) -> bool:
        return self.batcher.paused is not None

    @property
    def num_running(self) -> int:
        return self.unified.num_running

    @property
    def num_waiting(self) -> int:
        return self.unified.num_waiting + len(self.arrived)

    @property
    def num_transferring(self) -> int:
        return len(self.transfers)

    @property
    def counters(self) -> dict[str, float]:
        return {**self.unified.counters, **self.receiver.counters}

    @property
    def gauges(self) -> dict[str, float]:
        receiving = [transfer for transfer in self.transfers if transfer.status is TransferStatus.RECEIVING]
        bootstrapping = sum(self.receiver.phase(transfer.room) is Phase.RESERVING for transfer in receiving)
        return {**self.unified.gauges,
                "kv_transfers_bootstrapping": bootstrapping, "kv_transfers_in_flight": len(receiving) - bootstrapping,
                "kv_transfers_draining": self.transfers.count(TransferStatus.DRAINING)}

    def add(self, req: Req) -> None:
        if req.bootstrap is None:
            self.unified.add(req)
        else:
            self.arrived.append(req)
            self._new.append(req)

    def abort(self, req: Req, error: ServingError) -> None:
        transfer = self.transfers.find(req)
        if transfer is not None:
            self.transfers.abort(transfer, error)
        elif req in self.arrived or self._is_loading_first(req):
            if req in self.arrived:
                self.arrived.remove(req)
                self.batcher.remove([req])
            else:
                self.batcher.finish(req)
            assert req.bootstrap is not None
            self.receiver.decline(req.bootstrap.room, (req.bootstrap.host, req.bootstrap.port), error)
        else:
            self.unified.abort(req, error)

    def step(self, now: float) -> bool:
        for progress in self.transfers.poll():
            self._advance(progress)
        self._reserve_arrived()
        for req in self._new:
            if req in self.arrived:  # there is time: prefill need not send what comes from a storage meanwhile
                self.batcher.prefetch(req, req.num_prompt_tokens)
        self._new.clear()
        self.tracker.flush()  # so that first tokens which arrived do not wait for the step that is launched now
        self._close_started()
        return self.unified.step(now)

    def synchronize(self) -> None:
        self.unified.synchronize()

    def close(self) -> None:
        self.receiver.close()

    def _reserve_arrived(self) -> None:
        """Reserves pages in the queue's order while there are any; retracted requests that are as urgent come first."""
        while not self.paused and (head := self.arrived.peek()) is not None and self._is_next(head):
            self.unified.preempt_for(head, *self._admission.extent(head))
            req = self.arrived.admit(self._admission) if self.batcher.has_slot else None
            if req is None:
                return
            req.end_span("queue")
            if not self.batcher.load_from_tier(req, req.num_prompt_tokens, self._ask_prefill):
                self._ask_prefill(req)

    def _is_loading_first(self, req: Req) -> bool:
        """True where prefill is asked for what a tier does not have, once that has been loaded."""
        return req.bootstrap is not None and not req.num_retractions and req in self.batcher.queues.loading

    def _is_next(self, req: Req) -> bool:
        urgency = self.batcher.priorities.urgency
        waiting = self.batcher.waiting.peek()
        return waiting is None or urgency(req) > urgency(waiting)

    def _ask_prefill(self, req: Req) -> None:
        assert req.page_table is not None and req.bootstrap is not None
        first = req.page_table.num_cached_pages
        further = [(begin, own.span(begin, own.end).copy()) for own in req.page_table.groups
                   for begin in (max(own.cached_end, own.first),)]
        peer = (req.bootstrap.host, req.bootstrap.port)
        try:
            self.receiver.reserve(req.bootstrap.room, peer, req.prompt_digest, req.num_prompt_tokens,
                                  first, req.page_table.ids[first:].copy(), req.bootstrap.dp_rank, further)
        except ServingError as error:
            self.batcher.finish(req, keep=False)
            self.tracker.fail(req, error)
        else:
            self.transfers.open(req, TransferStatus.RECEIVING)
            self.batcher.add_transferring(req)

    def _advance(self, progress: Progress) -> None:
        transfer = progress.transfer
        if transfer.status is TransferStatus.DRAINING:
            if progress.settled:
                if progress.phase is Phase.DONE:  # it was aborted after all had arrived
                    self.receiver.acknowledge(transfer.room)
                self.transfers.close(transfer)
                transfer.req.keeps_pages = not self._scrubs_failed
                self.batcher.finish(transfer.req, keep=False)
        elif progress.failing:
            self._fail(transfer, self.transfers.error_for(transfer))
        elif progress.settled:
            self._start(transfer)

    def _fail(self, transfer: TransferRequest, error: ServingError) -> None:
        self.transfers.abort(transfer, error)
        self.tracker.fail(transfer.req, error)

    def _close_started(self) -> None:
        """Acknowledges the first tokens, which were sent: prefill need not retain these prompts any more."""
        for transfer in self._started:
            self.receiver.acknowledge(transfer.room)
            self.transfers.close(transfer)
        self._started.clear()

    def _start(self, transfer: TransferRequest) -> None:
        """Starts to decode a request whose KV cache and first token have arrived."""
        req = transfer.req
        result = self.receiver.result(transfer.room)
        if not 0 <= result.token_id < self.tracker.vocab_size:
            self._fail(transfer, TransferFailed(
                f"The prefill server chose token {result.token_id}, and this model's vocabulary has ids 0 to "
                f"{self.tracker.vocab_size - 1}: the two servers do not serve the same model."))
            return
        req.end_span("transfer")
        self._started.append(transfer)
        assert req.page_table is not None
        req.num_computed_tokens = req.num_prompt_tokens
        req.num_cached_tokens = req.page_table.num_cached_pages * self.batcher.cache.page_size
        if result.num_cached_tokens >= req.num_cached_tokens:
            req.num_cached_tokens, req.loaded = result.num_cached_tokens, result.loaded
        req.prompt_logprobs = result.prompt_logprobs
        if req.hidden is not None and result.hidden_states is not None:
            req.hidden.add_prefilled(result.hidden_states, req.num_prompt_tokens)
        if req.routed is not None and result.routed_experts is not None:
            req.routed.add_prefilled(result.routed_experts, req.num_prompt_tokens)
        self.batcher.cache.commit(req.page_table, req.prompt)
        self.batcher.start_decode(req)
        self.unified.report(req, req.append_token(result.token_id), result.logprobs)
        if req.finish is None:
            self._set_drafts(req, transfer.room, result.drafts)
        if self.batcher.paused == "retract":
            self.batcher.pause("retract")  # this request too

    def _set_drafts(self, req: Req, room: int, arrived: Drafts | None) -> None:
        """Sets the drafts that the request's first step here verifies: those that came with the draft's pages, else
        those of our own draft model, which has to compute the prompt first."""
        drafting = self.batcher.drafting
        if drafting is None or not drafting.on_device:
            return
        if self.receiver.with_draft(room):
            if arrived is not None and arrived.is_valid(self.tracker.vocab_size):
                req.drafts = arrived
            return
        assert req.page_table is not None
        self.unified.draft_prompt(req, req.page_table.num_cached_pages * self.batcher.cache.page_size)
