"""Scheduler of an embedding server: computes prompts and pools their hidden states; nothing is sampled."""

from __future__ import annotations

import torch

from ..api.errors import ServingError
from ..api.messages import Finish
from ..forward.forward_batch import ForwardBatch, Row, build_forward_batch
from ..request.batch import ScheduledBatch
from ..request.req import Req
from ..runner.model_runner import ModelRunner
from ..scheduler.batcher import Batcher
from ..scheduler.request_tracker import RequestTracker
from .peers import NoPeers


class EmbeddingScheduler:
    """Pools prompts: ``last`` takes the hidden state of the last token, ``mean`` the average over all tokens.

    A step's results are processed before the next one is launched: a step is a whole batch of prompts, and the host's
    work between two of them is small compared to that.
    """

    num_transferring = 0
    peers = NoPeers()

    def __init__(self, batcher: Batcher, runner: ModelRunner, tracker: RequestTracker):
        self.batcher = batcher
        self.tracker = tracker
        self._runner = runner
        self._sums: dict[Req, torch.Tensor] = {}  # of mean-pooled prompts with chunks to come

    @property
    def idle(self) -> bool:
        return self.batcher.idle

    @property
    def paused(self) -> bool:
        return self.batcher.paused is not None

    @property
    def num_running(self) -> int:
        return len(self.batcher.prefilling)

    @property
    def num_waiting(self) -> int:
        return self.batcher.num_waiting

    @property
    def gauges(self) -> dict[str, float]:
        return {}

    @property
    def counters(self) -> dict[str, float]:
        return {}

    def add(self, req: Req) -> None:
        assert req.pooling is not None
        self.batcher.waiting.append(req)

    def abort(self, req: Req, error: ServingError) -> None:
        self._sums.pop(req, None)
        self.batcher.finish(req)

    def synchronize(self) -> None:
        """There is nothing to wait for: no step is in flight between two calls of ``step``."""

    def close(self) -> None:
        """There is nothing to close: the process's end frees its memory."""

    def step(self, now: float) -> bool:
        self.batcher.poll_loads()
        batch = None if self.paused else self.batcher.next_prefill()
        if batch is None:
            self._runner.run_idle_batch()
            return False
        vectors = self._pooled(batch)
        self.batcher.mark_launched(batch)
        ended = [chunk.req for chunk in batch.chunks if chunk.samples]
        for req, vector in zip(ended, vectors):
            req.num_pending -= 1
            req.finish, req.embedding = Finish("stop"), vector
            self.tracker.add_output(req, [], None)
            self.batcher.finish(req)
        return True

    def _pooled(self, batch: ScheduledBatch) -> list[bytes]:
        """The pooled float32 vectors of the chunks that end their prompt."""
        info = self._runner.sync_dp(batch.num_tokens, 0, can_decode=False)
        rows_of = _pooled_rows(batch)
        hidden = self._runner.hidden_states(self._build(batch, [row for rows in rows_of for row in rows]), info)
        pooled, offset = [], 0
        for chunk, indices in zip(batch.chunks, rows_of):
            rows = hidden[offset:offset + len(indices)]
            offset += len(indices)
            if chunk.req.pooling == "mean":
                total = self._sums.pop(chunk.req, 0) + rows.sum(0, dtype=torch.float32)
                if chunk.samples:
                    pooled.append(total / chunk.stop)
                else:
                    self._sums[chunk.req] = total
            elif chunk.samples:
                pooled.append(rows[-1].float())
        if not pooled:
            return []
        return [vector.tobytes() for vector in self._runner.classify(torch.stack(pooled)).cpu().numpy()]

    def _build(self, batch: ScheduledBatch, logits_rows: list[int]) -> ForwardBatch:
        page_size = self._runner.layout.page_size
        rows = []
        for chunk in batch.chunks:
            assert chunk.req.page_table is not None
            rows.append(Row(chunk.req.tokens.view(chunk.start, chunk.stop), chunk.start, chunk.req.page_table.ids))
        return build_forward_batch(rows, page_size, self._runner.device, False, logits_rows)


def _pooled_rows(batch: ScheduledBatch) -> list[range]:
    """The batch's rows whose hidden states are pooled, for each chunk: all for ``mean``, one for the last token."""
    rows, end = [], 0
    for chunk in batch.chunks:
        begin, end = end, end + chunk.stop - chunk.start
        first = begin if chunk.req.pooling == "mean" else end - chunk.samples
        rows.append(range(first, end))
    return rows
