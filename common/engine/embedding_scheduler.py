"""Scheduler of an embedding server: computes prompts and pools their hidden states; nothing is sampled."""

from __future__ import annotations

import numpy as np
import torch

from ..api.errors import ServingError
from ..api.messages import Finish
from ..forward.forward_batch import ForwardBatch, TokenIds
from ..request.req import Req
from ..request.step_input import StepInput
from ..runner.model_runner import ModelRunner
from ..scheduler.batcher import Batcher
from ..scheduler.request_tracker import RequestTracker
from .peers import NoPeers


class EmbeddingScheduler:
    """Pools prompts: ``last`` takes the hidden state of the last token, ``cls`` that of the first, ``mean`` the average
    over all tokens.

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
        return self.batcher.tier_gauges

    @property
    def counters(self) -> dict[str, float]:
        return self.batcher.tier_counters

    def add(self, req: Req) -> None:
        assert req.pooling is not None
        self.batcher.prefetch(req, req.prefix_limit)
        self.batcher.enqueue(req)

    def abort(self, req: Req, error: ServingError) -> None:
        self._sums.pop(req, None)
        self.batcher.finish(req)

    def synchronize(self) -> None:
        """There is nothing to wait for: no step is in flight between two calls of ``step``."""

    def close(self) -> None:
        """There is nothing to close: the process's end frees its memory."""

    def step(self, now: float) -> bool:
        self.batcher.poll_loads(now)
        step = None if self.paused else self.batcher.next_prefill()
        if step is None:
            self._runner.run_idle_batch()
            return False
        vectors = self._pooled(step)
        self.batcher.mark_launched(step)
        for req, vector in zip(step.sampled_reqs, vectors):
            req.num_pending -= 1
            req.finish, req.embedding = Finish("stop"), vector
            self.tracker.add_output(req, [], None)
            self.batcher.finish(req)
        return True

    def _pooled(self, step: StepInput) -> list[bytes]:
        """The pooled float32 vectors of the chunks that end their prompt."""
        if self._runner.before_step is not None:
            self._runner.before_step(step.num_prefill)
        info = self._runner.sync_dp(step.num_tokens, 0, can_decode=False)
        rows_of = _pooled_rows(step)
        batch = ForwardBatch.from_columns(step.columns, TokenIds(step.known_tokens), self._runner.device,
                                          np.concatenate(rows_of).astype(np.int64))
        hidden = self._runner.hidden_states(batch, info=info)
        pooled, offset = [], 0
        for chunk, indices in zip(step.chunks, rows_of):
            rows = hidden[offset:offset + len(indices)]
            offset += len(indices)
            if chunk.req.pooling != "last":
                total = self._sums.pop(chunk.req, 0) + rows.sum(0, dtype=torch.float32)
                if chunk.samples:
                    pooled.append(total / chunk.stop if chunk.req.pooling == "mean" else total)
                else:
                    self._sums[chunk.req] = total
            elif chunk.samples:
                pooled.append(rows[-1].float())
        if not pooled:
            return []
        return [vector.tobytes() for vector in self._runner.classify(torch.stack(pooled)).cpu().numpy()]


def _pooled_rows(step: StepInput) -> list[range]:
    """The token rows whose hidden states are pooled, for each chunk: all for ``mean``, one for the last or the first
    token, in the chunk that has it."""
    rows, end = [], 0
    for chunk in step.chunks:
        begin, end = end, end + chunk.stop - chunk.start
        if chunk.req.pooling == "cls":
            rows.append(range(begin, begin + (chunk.start == 0)))
        else:
            rows.append(range(begin if chunk.req.pooling == "mean" else end - chunk.samples, end))
    return rows
