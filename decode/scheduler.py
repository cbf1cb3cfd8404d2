"""The decode server's scheduler.

A request reserves its pages first (what the prefix cache has is not asked for), tells the prefill server where to write
them, and joins the running batch when the cache and the first token have arrived. Memory is thus committed at the
receiver before anything is written. Running requests are the composed unified scheduler's; it also
computes prompts that come without a bootstrap room, and requests that were retracted.
"""

from __future__ import annotations

from ..common.api.errors import ServingError, TransferFailed
from ..common.distributed.tp import TPGroup
from ..common.engine.unified_scheduler import UnifiedScheduler
from ..common.request.req import Req
from ..kvtransfer.protocol.states import Phase
from ..kvtransfer.receiver.kv_receiver import KVReceiver
from ..kvtransfer.requests import Progress, TransferRequest, TransferStatus, TransferTable
from .peers import PrefillPeers


class DecodeScheduler:
    """Reserves, receives, decodes."""

    def __init__(self, unified: UnifiedScheduler, receiver: KVReceiver, tp: TPGroup):
        self.unified = unified
        self.batcher = unified.batcher
        self.tracker = unified.tracker
        self.receiver = receiver
        self.rooms = TransferTable(receiver, tp)
        self.peers = PrefillPeers(receiver)
        self.arrived = self.batcher.make_queue()
        self._begun: list[TransferRequest] = []  # in this step

    @property
    def idle(self) -> bool:
        return self.unified.idle and not self.arrived and not len(self.rooms)

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
        return len(self.rooms)

    @property
    def counters(self) -> dict[str, float]:
        return {**self.unified.counters, **self.receiver.counters}

    @property
    def gauges(self) -> dict[str, float]:
        receiving = [half for half in self.rooms if half.stage is TransferStatus.RECEIVING]
        meeting = sum(self.receiver.phase(half.room) is Phase.RESERVING for half in receiving)
        return {"kv_transfers_bootstrapping": meeting, "kv_transfers_in_flight": len(receiving) - meeting,
                "kv_transfers_draining": self.rooms.count(TransferStatus.DRAINING)}

    def add(self, req: Req) -> None:
        if req.bootstrap is None:
            self.unified.add(req)
        else:
            self.arrived.append(req)

    def abort(self, req: Req, error: ServingError) -> None:
        half = self.rooms.of(req)
        if half is not None:
            self.rooms.abort(half, error)
        elif req in self.arrived:
            self.arrived.remove(req)
            assert req.bootstrap is not None
            self.receiver.decline(req.bootstrap.room, (req.bootstrap.host, req.bootstrap.port), error)
        else:
            self.unified.abort(req, error)

    def step(self, now: float) -> bool:
        for progress in self.rooms.poll():
            self._advance(progress)
        self._reserve_arrived()
        self.tracker.flush()  # first tokens that have arrived need not wait for the step that is launched now
        self._close_begun()
        return self.unified.step(now)

    def synchronize(self) -> None:
        self.unified.synchronize()

    def close(self) -> None:
        self.receiver.close()

    def _reserve_arrived(self) -> None:
        """Reserve in the queue's order while there is room; retracted requests that are as urgent come first."""
        while not self.paused and (req := self.arrived.peek()) is not None and self._is_next(req):
            self.unified.preempt_for(req, req.num_prompt_tokens, req.num_prompt_tokens)
            if not self.batcher.has_slot or not self.batcher.page_budget.reserve(
                    req, req.num_prompt_tokens, req.num_prompt_tokens):
                return
            self.arrived.remove(req)
            req.end_span("queue")
            self._ask_prefill(req)

    def _is_next(self, req: Req) -> bool:
        urgency = self.batcher.priorities.urgency
        waiting = self.batcher.waiting.peek()
        return waiting is None or urgency(req) > urgency(waiting)

    def _ask_prefill(self, req: Req) -> None:
        assert req.page_table is not None and req.bootstrap is not None
        first = req.page_table.num_cached_pages
        peer = (req.bootstrap.host, req.bootstrap.port)
        try:
            self.receiver.reserve(req.bootstrap.room, peer, req.prompt_digest, req.num_prompt_tokens,
                                  first, req.page_table.ids[first:].copy(), req.bootstrap.dp_rank)
        except ServingError as error:
            self.batcher.finish(req, keep=False)
            self.tracker.fail(req, error)
        else:
            self.rooms.open(req, TransferStatus.RECEIVING)
            self.batcher.add_transferring(req)

    def _advance(self, progress: Progress) -> None:
        half = progress.half
        if half.stage is TransferStatus.DRAINING:
            if progress.settled:
                if progress.phase is Phase.DONE:  # it was aborted when all had arrived
                    self.receiver.taken(half.room)
                self.rooms.close(half)
                self.batcher.finish(half.req, keep=False)
        elif progress.failing:
            self._fail(half, self.rooms.error_of(half))
        elif progress.settled:
            self._start(half)

    def _fail(self, half: TransferRequest, error: ServingError) -> None:
        self.rooms.abort(half, error)
        self.tracker.fail(half.req, error)

    def _close_begun(self) -> None:
        """First tokens are out: prefill need not keep anything for another attempt."""
        for half in self._begun:
            self.receiver.taken(half.room)
            self.rooms.close(half)
        self._begun.clear()

    def _start(self, half: TransferRequest) -> None:
        """Cache and first token are here: the request decodes from now on."""
        req = half.req
        result = self.receiver.result(half.room)
        if not 0 <= result.token_id < self.tracker.vocab_size:
            self._fail(half, TransferFailed(
                f"The prefill server chose token {result.token_id}, and this model's vocabulary has ids 0 to "
                f"{self.tracker.vocab_size - 1}: the two servers do not serve the same model."))
            return
        req.end_span("transfer")
        self._begun.append(half)
        assert req.page_table is not None
        req.num_computed_tokens = req.num_prompt_tokens
        req.num_cached_tokens = max(result.num_cached_tokens,
                                    req.page_table.num_cached_pages * self.batcher.cache.page_size)
        req.prompt_logprobs = result.prompt_logprobs
        if req.hidden is not None and result.hidden_states is not None:
            req.hidden.add_prefilled(result.hidden_states, req.num_prompt_tokens)
        self.batcher.cache.commit(req.page_table, req.prompt)
        self.batcher.start_decode(req)
        self.unified.report(req, req.append_token(result.token_id), result.logprobs)
        if self.batcher.paused == "retract":
            self.batcher.pause("retract")  # this one too
