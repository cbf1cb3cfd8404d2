"""Runs batches: builds the model's input, launches it, samples, and gathers log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..api.messages import Logprobs
from .batcher import Batch, Chunk
from .forward_batch import AfterGroup, ForwardBatch, Row, build_forward_batch
from .req import Req

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .sampler import Launched, Sampled, Sampler


@dataclass(frozen=True)
class Gain:
    """The token that a request gained in a step; the request itself is not touched yet."""

    req: Req
    token_id: int
    logprobs: Logprobs | None


@dataclass(frozen=True)
class Step:
    """A batch that was launched. Its results stay on the device until ``gains`` asks for them."""

    batch: Batch
    sampled: Launched
    sampling: list[Req]
    prompt_rows: list[_PromptRow]
    prompt_logits: torch.Tensor | None

    def gains(self) -> list[Gain]:
        """Wait for the step; a gain for each chunk that reached its request's end, in batch order."""
        if self.prompt_logits is not None:
            _take_prompt_logprobs(self.prompt_logits, self.prompt_rows)
        sampled = self.sampled.wait()
        return [Gain(req, sampled.token_ids[i], _logprobs(req, sampled, i)) for i, req in enumerate(self.sampling)]


class Executor:
    """One rank's model and sampler. Launched steps run in order; what one samples, the next may compute on."""

    def __init__(self, runner: ModelRunner, sampler: Sampler):
        self._runner = runner
        self._sampler = sampler
        self._last: Step | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether ``launch`` returns before the step has run, so that the host can work meanwhile."""
        return self._runner.device.type == "cuda"

    def launch(self, batch: Batch, after_group: AfterGroup | None = None) -> Step:
        """Start computing the batch. Pending tokens are taken from the step launched before, on the device.

        ``after_group(g, event)`` is called once layer group g's keys and values are on their way into the pool;
        ``event`` (None on a CPU) tells when they are there.
        """
        prompt_rows = [] if batch.is_decode else _prompt_logprob_rows(batch)
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        ends = np.cumsum([chunk.stop - chunk.start for chunk in batch.chunks])
        rows = [int(end) - 1 for end, chunk in zip(ends, batch.chunks) if chunk.samples]
        rows += [row.index for row in prompt_rows]
        logits = self._runner.forward(self._build(batch, rows), after_group)
        count = len(sampling)
        step = Step(batch, self._sample(logits[:count], sampling), [chunk.req for chunk in sampling], prompt_rows,
                    logits[count:count + len(prompt_rows)] if prompt_rows else None)
        self._last = step
        return step

    def event(self) -> torch.cuda.Event | None:
        """An event that happens when all launched steps have run; None where launching is computing."""
        if not self.asynchronous:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _build(self, batch: Batch, logits_rows: list[int]) -> ForwardBatch:
        runner, page_size = self._runner, self._runner.layout.page_size
        last = {} if self._last is None else {req: i for i, req in enumerate(self._last.sampling)}
        rows = []
        for chunk in batch.chunks:
            req = chunk.req
            assert req.hold is not None
            pages = req.hold.ids[:-(-chunk.stop // page_size)]
            source = last[req] if chunk.stop > len(req.tokens) else None
            rows.append(Row(req.tokens.view(chunk.start, chunk.stop), chunk.start, pages, source))
        if batch.is_decode:
            rows += runner.padding(len(rows))
        previous = None if self._last is None else self._last.sampled.tokens
        return build_forward_batch(rows, page_size, runner.device, batch.is_decode, logits_rows, previous)

    def _sample(self, logits: torch.Tensor, chunks: list[Chunk]) -> Launched:
        return self._sampler.launch(logits, [chunk.req.choosing(chunk.stop) for chunk in chunks])


def _logprobs(req: Req, sampled: Sampled, row: int) -> Logprobs | None:
    if req.num_top_logprobs is None:
        return None
    return Logprobs([sampled.token_ids[row]], [sampled.logprobs[row]], [sampled.tops[row]])


@dataclass(frozen=True)
class _PromptRow:
    """Row ``index`` of the batch predicts prompt token ``position`` of ``req``."""

    req: Req
    index: int
    position: int


def _prompt_logprob_rows(batch: Batch) -> list[_PromptRow]:
    rows, offset = [], 0
    for chunk in batch.chunks:
        req = chunk.req
        if req.logprob_start is not None:
            if req.prompt_logprobs is None:
                # Nothing precedes the first token, so it has no logprob.
                first = req.logprob_start == 0
                req.prompt_logprobs = Logprobs([int(req.prompt[0])] if first else [], [None] if first else [],
                                               [[]] if first else [])
            wanted = req.logprob_start + len(req.prompt_logprobs.values)
            for position in range(max(wanted, chunk.start + 1), min(chunk.stop + 1, req.num_prompt_tokens)):
                rows.append(_PromptRow(req, offset + position - 1 - chunk.start, position))
        offset += chunk.stop - chunk.start
    return rows


def _take_prompt_logprobs(logits: torch.Tensor, rows: list[_PromptRow]) -> None:
    logprobs = torch.log_softmax(logits, dim=-1)
    token_ids = np.array([row.req.prompt[row.position] for row in rows], dtype=np.int64)
    chosen = logprobs.gather(1, torch.from_numpy(token_ids).to(logits.device)[:, None])[:, 0].tolist()
    most = max(row.req.num_top_logprobs or 0 for row in rows)
    top = logprobs.topk(most, dim=-1) if most else None
    top_ids, top_values = (top.indices.tolist(), top.values.tolist()) if top else ([], [])
    for i, row in enumerate(rows):
        kept = row.req.prompt_logprobs
        count = row.req.num_top_logprobs or 0
        assert kept is not None
        kept.token_ids.append(int(token_ids[i]))
        kept.values.append(chosen[i])
        kept.top.append(list(zip(top_ids[i][:count], top_values[i][:count])) if count else [])
