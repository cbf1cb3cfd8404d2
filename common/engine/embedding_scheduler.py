"""The scheduler of an embedding server: prompts are computed, their hidden states pooled, nothing is sampled."""

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
    """``last`` pooling takes the hidden state of a prompt's last token, ``mean`` the average over all of them.

    A step's results are taken in before the next one: a step is a whole batch of prompts, beside which the host's work
    between two of them is small.
    """

    num_transferring = 0
    peers = NoPeers()

    def __init__(self, batcher: Batcher, runner: ModelRunner, ledger: RequestTracker):
        self.batcher = batcher
        self.ledger = ledger
        self._runner = runner
        self._sums: dict[Req, torch.Tensor] = {}  # of prompts that are averaged and not computed to their end

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
        return len(self.batcher.waiting)

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

    def settle(self) -> None:
        """No step is ever in flight between two turns."""

    def close(self) -> None:
        """Nothing to let go of beside the process's memory."""

    def step(self, now: float) -> bool:
        batch = None if self.paused else self.batcher.next_prefill()
        if batch is None:
            self._runner.accompany()
            return False
        vectors = self._pooled(batch)
        self.batcher.launched(batch)
        ended = [chunk.req for chunk in batch.chunks if chunk.samples]
        for req, vector in zip(ended, vectors):
            req.num_pending -= 1
            req.finish, req.embedding = Finish("stop"), vector
            self.ledger.gain(req, [], None)
            self.batcher.finish(req)
        return True

    def _pooled(self, batch: ScheduledBatch) -> list[bytes]:
        """The pooled float32 vectors of the chunks that end their prompt."""
        self._runner.meet(batch.num_tokens, 0, decodes=False)
        wanted = _pooled_rows(batch)
        hidden = self._runner.hidden(self._build(batch, [row for rows in wanted for row in rows]))
        pooled, offset = [], 0
        for chunk, places in zip(batch.chunks, wanted):
            rows = hidden[offset:offset + len(places)]
            offset += len(places)
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
        return [vector.tobytes() for vector in self._runner.score(torch.stack(pooled)).cpu().numpy()]

    def _build(self, batch: ScheduledBatch, wanted: list[int]) -> ForwardBatch:
        page_size = self._runner.layout.page_size
        rows = []
        for chunk in batch.chunks:
            assert chunk.req.hold is not None
            rows.append(Row(chunk.req.tokens.view(chunk.start, chunk.stop), chunk.start, chunk.req.hold.ids))
        return build_forward_batch(rows, page_size, self._runner.device, False, wanted)


def _pooled_rows(batch: ScheduledBatch) -> list[range]:
    """Of each chunk the batch's rows whose hidden states are pooled: the mean's are all, the last token's is one."""
    found, end = [], 0
    for chunk in batch.chunks:
        begin, end = end, end + chunk.stop - chunk.start
        first = begin if chunk.req.pooling == "mean" else end - chunk.samples
        found.append(range(first, end))
    return found
