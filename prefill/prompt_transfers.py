"""Prompts that are computed for decode servers, from their arrival to the end of their transfer.

A request waits for decode to name its destination (BOOTSTRAPPING), is computed chunk by chunk while finished pages are
pushed to decode (COMPUTING), and ends when the last write and the first token have arrived (SENDING). Its pages then
stay in the prefix cache. Until a transfer has settled, its pages stay allocated: a write may still be reading them.
Where decode dies before it acknowledges the first token, another attempt finds the computed prompt
(retained_prompts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..common.api.errors import AbortRequested, InvalidRequest, ServingError
from ..common.api.messages import Finish, Logprobs
from ..common.config.server.disaggregation import TransferOverlap
from ..common.distributed.agreement import RankAgreement
from ..common.forward.forward_batch import AfterGroup
from ..common.request.req import Req
from ..common.request.step_input import StepInput
from ..common.request.step_output import RowResult
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

if TYPE_CHECKING:
    import torch


class PromptTransfers:
    """Prompts whose pages are pushed to the decode server that reserved pages for each request's room; a scheduler's
    steps compute them."""

    def __init__(self, batcher: Batcher, tracker: RequestTracker, sender: KVSender, group: RankAgreement,
                 layer_groups: Sequence[int], *, register: Callable[[RankInfo], None], kv_retain_seconds: float,
                 event: Callable[[], torch.cuda.Event | None], transfer_overlap: TransferOverlap = "layers",
                 draft_groups: int = 0, synchronize: Callable[[], None] = lambda: None):
        """``layer_groups`` of each cache group, and ``draft_groups`` of the draft's pool: see KVPush. ``synchronize``
        waits for the step in flight, where other servers write into this engine's free pages."""
        self.batcher = batcher
        self.tracker = tracker
        self.sender = sender
        self.transfers = TransferTable(sender, group, topic="sent")
        self.retained = RetainedPrompts(batcher.cache, sender, group, kv_retain_seconds)
        self.peers = DecodePeers(sender, self.retained, register)
        self._kv_push = KVPush(sender, batcher.cache, layer_groups, transfer_overlap, event, draft_groups)
        self._register = register
        self._synchronize = synchronize
        self._first_tokens: dict[int, tuple[list[int], Logprobs | None]] = {}  # by room
        self._now = 0.0

    @property
    def idle(self) -> bool:
        return not len(self.transfers)

    @property
    def num_waiting(self) -> int:
        """Requests whose destination is not known yet."""
        return self.transfers.count(TransferStatus.BOOTSTRAPPING)

    @property
    def num_transferring(self) -> int:
        return self.transfers.count(TransferStatus.SENDING) + self.transfers.count(TransferStatus.DRAINING)

    @property
    def counters(self) -> dict[str, float]:
        return {**self.sender.counters, "reused_prompts": self.retained.num_reused}

    @property
    def gauges(self) -> dict[str, float]:
        queued, in_flight = self.sender.writes_waiting
        return {"kv_transfers_bootstrapping": self.transfers.count(TransferStatus.BOOTSTRAPPING),
                "kv_transfers_in_flight": self.transfers.count(TransferStatus.SENDING),
                "kv_transfers_draining": self.transfers.count(TransferStatus.DRAINING),
                "kv_writes_queued": queued, "kv_writes_in_flight": in_flight,
                "kv_prompts_retained": len(self.retained)}

    def add(self, req: Req) -> None:
        if req.bootstrap is None:
            raise InvalidRequest(
                "A prefill server needs bootstrap_host, bootstrap_port and bootstrap_room; send to the router instead.",
                param="bootstrap_room")
        req.sends_kv = True
        self.sender.expect(req.bootstrap.room, req.prompt_digest, req.num_prompt_tokens)
        self.retained.drop(req.bootstrap.room)
        self.transfers.open(req, TransferStatus.BOOTSTRAPPING)
        self.batcher.prefetch(req, req.prefix_limit)

    def abort(self, req: Req, error: ServingError) -> None:
        transfer = self.transfers.find(req)
        assert transfer is not None
        self.batcher.remove([req])
        self.transfers.abort(transfer, error)
        # The client that disconnected may be the router, which tries again with another decode server.
        self.retained.on_failed(transfer.room, self._now, may_retry=not isinstance(error, AbortRequested))

    def register(self) -> None:
        """Registers this rank with the server's bootstrap server, where decode servers look for it."""
        self._register(self.sender.info)

    def close(self) -> None:
        self.sender.close()

    def poll(self, now: float) -> None:
        """Acts on what has become of the transfers; once a step, before it is launched."""
        self._now = now
        self.retained.sweep(now)
        for progress in self.transfers.poll():
            self._advance(progress)

    def step_tokens(self) -> int | None:
        """Returns the prompt tokens up to which further prompts join a step; None without prompts to send."""
        return None if self.idle else step_tokens(self.batcher)

    def before_launch(self, step: StepInput) -> AfterGroup | None:
        """Pushes the cached pages of requests that ``step`` begins to compute; returns the callback that pushes those
        that it computes, which the executor calls after each layer group."""
        chunks = [chunk for chunk in step.prefill_chunks if chunk.req.sends_kv]
        if not chunks:
            return None
        self._kv_push.push_cached(chunks)
        return self._kv_push.callback_for(chunks)

    # -- life of a transfer ----------------------------------------------------------------------

    def _advance(self, progress: Progress) -> None:
        transfer = progress.transfer
        if transfer.status is TransferStatus.DRAINING:
            if progress.settled:
                self._release(transfer)
        elif progress.failing:
            self._synchronize()  # the step in flight may write into the pages, which another server writes into next
            error = self.transfers.error_for(transfer)
            self.abort(transfer.req, error)
            self.retained.on_failed(transfer.room, self._now, may_retry=not progress.aborted)
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
        if (result := self.retained.reuse(req)) is None:
            self.batcher.enqueue(req)
            return
        self.batcher.remove([req])  # its prefetch
        assert req.page_table is not None
        req.num_computed_tokens = req.num_cached_tokens = req.num_prompt_tokens
        req.prompt_logprobs = result.prompt_logprobs
        self._kv_push.push_retained(req)
        self._hand_over(transfer, req.append_token(result.token_id), result)

    def take_in(self, step: StepInput, result: RowResult) -> None:
        """Hands a prompt over that ``step`` has computed; one that was aborted meanwhile is ignored."""
        req, token_ids, logprobs, error, drafts, _ = result
        transfer = self.transfers.find(req)
        if transfer is None or transfer.status is not TransferStatus.COMPUTING:
            return
        if error is not None:
            self.abort(req, error)
            self.tracker.fail(req, error)
            return
        self.batcher.remove([req])
        if step.draft_limits:
            assert req.page_table is not None
            self.batcher.cache.trim(req.page_table, req.num_prompt_tokens)
        hidden = None if req.hidden is None else req.hidden.take()
        routed = None if req.routed is None else req.routed.take()
        self._hand_over(transfer, req.append_pending(*token_ids), PrefillResult(
            token_ids[0], req.num_cached_tokens, logprobs, req.prompt_logprobs, hidden, routed, drafts, req.loaded))

    def _hand_over(self, transfer: TransferRequest, token_ids: list[int], result: PrefillResult) -> None:
        """Sends the first token after the pages of a computed prompt."""
        req = transfer.req
        transfer.advance(TransferStatus.SENDING)
        req.end_span("prefill")
        self._first_tokens[transfer.room] = (token_ids, result.logprobs)
        req.finish = req.finish or Finish("length")
        self.retained.add(transfer.room, req, result)
        self.sender.finish(transfer.room, result)

    def _release(self, transfer: TransferRequest) -> None:
        """Ends a transfer whose pages no write can touch any more; its computed pages stay in the prefix cache."""
        self._first_tokens.pop(transfer.room, None)
        if transfer.status is TransferStatus.SENDING:
            self.transfers.close(transfer, forget=lambda room: self.retained.on_done(room, self._now))
        else:
            self.transfers.close(transfer)
        self.batcher.finish(transfer.req)
