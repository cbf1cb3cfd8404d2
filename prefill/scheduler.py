"""The prefill server's scheduler: steps over the prompts that are computed for decode servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..common.api.errors import ServingError
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
from ..kvtransfer.protocol.messages import RankInfo
from ..kvtransfer.sender.kv_sender import KVSender
from .prompt_transfers import PromptTransfers


class PrefillScheduler:
    """Computes prompts and pushes their pages to decode servers."""

    def __init__(self, batcher: Batcher, executor: Executor | PPExecutor, tracker: RequestTracker, sender: KVSender,
                 group: RankAgreement, layer_groups: Sequence[int], *, register: Callable[[RankInfo], None],
                 overlap: bool, kv_retain_seconds: float, transfer_overlap: TransferOverlap = "layers",
                 draft_groups: int = 0):
        """``layer_groups`` of each cache group, and ``draft_groups`` of the draft's pool: see KVPush."""
        self.batcher = batcher
        self.executor = executor
        self.tracker = tracker
        self.sender = sender
        self._rate = None if batcher.rates is None else batcher.rates.prefill_rate
        self._pipeline = make_pipeline(batcher, executor, self._process_results, overlap=overlap, rate=self._rate)
        self.prompts = PromptTransfers(
            batcher, tracker, sender, group, layer_groups, register=register, kv_retain_seconds=kv_retain_seconds,
            event=lambda: executor.event(), transfer_overlap=transfer_overlap, draft_groups=draft_groups)
        self.transfers = self.prompts.transfers
        self.peers = self.prompts.peers

    @property
    def idle(self) -> bool:
        return self.batcher.idle and self.prompts.idle and self._pipeline.in_flight is None

    @property
    def paused(self) -> bool:
        return self.batcher.paused is not None

    @property
    def num_running(self) -> int:
        return len(self.batcher.prefilling)

    @property
    def num_waiting(self) -> int:
        return self.batcher.num_waiting + self.prompts.num_waiting

    @property
    def num_transferring(self) -> int:
        return self.prompts.num_transferring

    @property
    def counters(self) -> dict[str, float]:
        return {**self.prompts.counters, **self.batcher.tier_counters}

    @property
    def gauges(self) -> dict[str, float]:
        return {**self.prompts.gauges, **self.batcher.tier_gauges}

    def add(self, req: Req) -> None:
        self.prompts.add(req)

    def abort(self, req: Req, error: ServingError) -> None:
        self.prompts.abort(req, error)

    def step(self, now: float) -> bool:
        self.prompts.poll(now)
        self.batcher.poll_loads(now)
        step = None if self.paused else self.batcher.next_prefill(self.prompts.step_tokens())
        launched = self._pipeline.advance(step, None if step is None else self.prompts.before_launch(step))
        self.batcher.flush_stores()
        return launched

    def synchronize(self) -> None:
        self._pipeline.synchronize()

    def close(self) -> None:
        self.prompts.close()

    def _process_results(self, launched: Launched) -> None:
        step, output = launched.step, launched.wait()
        if self._rate is not None:
            self._rate.end()
        add_prompt_results(step, output)
        for result in row_results(step, output):
            self.prompts.take_in(step, result)
