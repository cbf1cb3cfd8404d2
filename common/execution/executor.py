"""The executor runs batches: builds the model's input, launches the forward pass, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..api.errors import InvalidRequest, ServingError
from ..api.messages import Logprobs
from ..forward.forward_batch import AfterGroup, DecodeRows, ForwardBatch, Row, build_decode_batch, build_forward_batch
from ..forward.host_copies import upload
from ..grammar.store import GrammarStore
from ..request.batch import Chunk, ScheduledBatch
from ..request.input_batch import InputBatch
from ..request.req import Req
from ..request.sampling_metadata import FAILED, FillAllowed
from ..sampling.hidden_rows import HiddenReport, HiddenRows, hidden_rows
from ..sampling.prompt_logprobs import PromptReport, prompt_rows
from ..sampling.sampled_tokens import SampledTokenBuffers, SampledTokens

if TYPE_CHECKING:
    from ..runner.dp_sync import DPStepInfo
    from ..runner.model_runner import ModelRunner
    from ..sampling.sampler import PendingSample, Sampler


class NewToken(NamedTuple):
    """The new token of a request, which has not been appended to it yet. With an ``error`` there is none, and the
    request fails."""

    req: Req
    token_id: int
    logprobs: Logprobs | None
    error: ServingError | None = None


@dataclass(frozen=True)
class StepOutput:
    """The output of a launched batch. It stays on the device until ``new_tokens`` waits for it."""

    batch: ScheduledBatch
    sampled: PendingSample | SampledTokens
    sampled_reqs: list[Req]
    prompt_report: PromptReport | None
    hidden_report: HiddenReport | None

    def plain_token_ids(self) -> list[int] | None:
        """Waits for the step; returns the tokens of ``sampled_reqs`` where they are all of its output, else None."""
        input_batch = self.batch.input_batch
        return None if input_batch is None or not input_batch.all_plain else self.sampled.token_ids()

    def new_tokens(self) -> list[NewToken]:
        """Waits for the step; returns a token for each chunk that reached its request's end, in batch order. Appends
        prompt log-probabilities and hidden states to their requests."""
        if self.prompt_report is not None:
            self.prompt_report.append_to_requests()
        if self.hidden_report is not None:
            self.hidden_report.append_to_requests()
        sampled = self.sampled.wait()
        new_tokens = []
        for i, (req, token_id, logprob) in enumerate(zip(self.sampled_reqs, sampled.token_ids, sampled.logprobs)):
            logprobs = logprob and Logprobs([token_id], [logprob.value], [logprob.top], [logprob.of_ids])
            error = None
            if token_id == FAILED:
                error = InvalidRequest(sampled.failures.get(i, "custom_logit_processor failed."))
            new_tokens.append(NewToken(req, token_id, logprobs, error))
        return new_tokens


class Executor:
    """One rank's model and sampler. Launched steps run in order; a step may compute on the tokens of the step
    before."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, grammars: GrammarStore | None = None):
        """``grammars``: those of requests with a matcher, on the rank that samples."""
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._token_buffers = SampledTokenBuffers()
        self._last: StepOutput | None = None

    @property
    def asynchronous(self) -> bool:
        """True if ``launch`` returns before the step has run, so that the host can work meanwhile."""
        return self._runner.device.type == "cuda"

    def launch(self, batch: ScheduledBatch, after_group: AfterGroup | None = None) -> StepOutput:
        """Starts computing the batch. Pending tokens are read from the step launched before, on the device.

        ``after_group(g, event)`` is called once layer group g's keys and values have been enqueued; the pool has them
        after ``event`` (None on a CPU). Where a request has a grammar, its mask is filled while the device runs the
        forward pass; that needs its pending token, so that the host then waits for the step before.
        """
        if batch.input_batch is not None and batch.input_batch.all_plain:
            self._last = self._launch_plain_decode(batch, batch.input_batch)
            return self._last
        logprob_rows = [] if batch.is_decode else prompt_rows(batch)
        sampled_chunks = batch.chunks if batch.is_decode else [chunk for chunk in batch.chunks if chunk.samples]
        rows = list(range(len(sampled_chunks))) if batch.is_decode else _sampled_rows(batch)
        rows += [row.index for row in logprob_rows]
        hidden = hidden_rows(batch)
        pending = self._pending_indices(batch)
        info = self._runner.sync_dp(batch.num_tokens, len(rows), can_decode=batch.is_decode and not hidden)
        logits, states = self._forward(batch, rows, hidden, pending, after_group, info)
        count = len(sampled_chunks)
        allowed = self._fill_masks(sampled_chunks, pending)
        metadata = [chunk.req.sampling_metadata(chunk.stop, pending.get(chunk.req), allowed.get(chunk.req))
                    for chunk in sampled_chunks]
        sampled = self._sampler.launch(logits[:count], metadata, self._previous)
        report = PromptReport(logprob_rows, logits[count:count + len(logprob_rows)]) if logprob_rows else None
        step = StepOutput(batch, sampled, [chunk.req for chunk in sampled_chunks], report,
                          HiddenReport(hidden, states) if hidden else None)
        self._last = step
        return step

    def _launch_plain_decode(self, batch: ScheduledBatch, input_batch: InputBatch) -> StepOutput:
        """Starts a decode step of a batch whose requests need nothing but tokens."""
        last = self._last
        same_rows = last is not None and last.sampled_reqs is input_batch.reqs
        token_ids = last.sampled.tokens if last is not None and same_rows else self._last_token_ids(input_batch)
        info = self._runner.sync_dp(len(input_batch), len(input_batch), can_decode=True)
        logits, argmax = self._runner.decode(input_batch.decode_table(), token_ids, info)
        # Every rank has the whole logits, bit by bit the same: so each computes the same argmax.
        tokens = (argmax if input_batch.all_greedy and argmax is not None else
                  self._sampler.sample_plain(logits, input_batch.sampling_metadata()))
        return StepOutput(batch, self._token_buffers.copy(tokens), input_batch.reqs, None, None)

    def _last_token_ids(self, input_batch: InputBatch) -> torch.Tensor:
        """Returns the last token [B] int64 of each request, on the device."""
        last, device = self._last, self._runner.device
        reused = last is not None and last.sampled_reqs is input_batch.previous_reqs
        known, pending = input_batch.last_tokens(reused_on_device=reused)
        sources = input_batch.reused_rows.tolist() if reused else []
        rows = list(range(len(sources)))
        if pending:
            assert last is not None, "a pending token comes from a step"
            row_of = {req: row for row, req in enumerate(last.sampled_reqs)}
            sources, rows = sources + [row_of[input_batch.reqs[row]] for row in pending], rows + pending
        if last is None or not rows:
            return upload(known, torch.int64, device)
        if len(rows) == len(known):
            return last.sampled.tokens[upload(sources, torch.int64, device)]
        token_ids = upload(known, torch.int64, device)
        device_rows, device_sources = upload([rows, sources], torch.int64, device)
        token_ids[device_rows] = last.sampled.tokens[device_sources]
        return token_ids

    def forward(self, batch: ScheduledBatch, after_group: AfterGroup | None = None) -> None:
        """Does as ``launch`` on a pipeline stage before the last one, which has no logits. No token may be pending."""
        self._runner.forward(self._build(batch, [], {}, padded=False), after_group)

    def run_idle_batch(self) -> None:
        """Takes part in the computation of other data-parallel ranks, in an iteration without a batch."""
        self._runner.run_idle_batch()

    def event(self) -> torch.cuda.Event | None:
        """Records an event after all launched steps; returns None where launching computes."""
        if not self.asynchronous:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @property
    def _previous(self) -> torch.Tensor | None:
        """The tokens that the previous step sampled."""
        return None if self._last is None else self._last.sampled.tokens

    def _pending_indices(self, batch: ScheduledBatch) -> dict[Req, int]:
        """Returns the index in ``_previous`` of each pending token, by request."""
        pending = [chunk.req for chunk in batch.chunks if chunk.stop > chunk.req.tokens.count]
        if not pending:
            return {}
        assert self._last is not None, "a pending token comes from a step"
        indices = dict(zip(self._last.sampled_reqs, range(len(self._last.sampled_reqs))))
        if pending == self._last.sampled_reqs:  # the same decode batch: requests are compared by identity
            return indices
        return {req: indices[req] for req in pending}

    def _fill_masks(self, chunks: Sequence[Chunk], pending: dict[Req, int]) -> dict[Req, FillAllowed]:
        """Fills the masks of requests with a grammar."""
        constrained = [(chunk.req, chunk.req.matcher) for chunk in chunks if chunk.req.matcher is not None]
        if not constrained:
            return {}
        assert self._grammars is not None
        needs_previous = any(req in pending for req, _ in constrained)
        previous = self._last.sampled.token_ids() if self._last and needs_previous else []
        live = [(req, matcher) for req, matcher in constrained
                if matcher.advance(previous[pending[req]] if req in pending else None)]
        return dict(zip([req for req, _ in live], self._grammars.fill([matcher for _, matcher in live])))

    def _forward(self, batch: ScheduledBatch, rows: list[int], hidden: list[HiddenRows], pending: dict[Req, int],
                 after_group: AfterGroup | None, info: DPStepInfo | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits of ``rows``, and the hidden states of ``hidden``."""
        if not hidden:
            logits = self._runner.forward(self._build(batch, rows, pending, info), after_group, info)
            return logits, logits[:0]
        indices = rows + [row for one in hidden for row in range(one.start, one.stop)]
        forward_batch = self._build(batch, indices, pending, padded=False)
        return self._runner.forward_with_hidden(forward_batch, len(rows), after_group, info)

    def _build(self, batch: ScheduledBatch, logits_rows: list[int], pending: dict[Req, int],
               info: DPStepInfo | None = None, *, padded: bool = True) -> ForwardBatch:
        """Builds the model's input; ``padded``: to a size that a CUDA graph was captured for."""
        runner, page_size = self._runner, self._runner.layout.page_size
        if batch.is_decode and not any(chunk.req.embeds is not None for chunk in batch.chunks):
            padding = runner.padding_rows(len(batch.chunks), info) if padded else []
            return build_decode_batch(_decode_rows(batch.chunks, pending, padding), page_size, runner.device,
                                      logits_rows, self._previous)
        rows = []
        for chunk in batch.chunks:
            req = chunk.req
            assert req.page_table is not None
            pages = req.page_table.ids[:-(-chunk.stop // page_size)]
            embeds = None if req.embeds is None else req.embeds[chunk.start:chunk.stop]
            rows.append(Row(req.tokens.view(chunk.start, chunk.stop), chunk.start, pages, pending.get(req),
                            embeds if embeds is not None and len(embeds) else None))
        if batch.is_decode and padded:
            rows += runner.padding_rows(len(rows), info)
        return build_forward_batch(rows, page_size, runner.device, batch.is_decode, logits_rows, self._previous)


def _sampled_rows(batch: ScheduledBatch) -> list[int]:
    """Returns the batch's token rows whose logits are sampled."""
    ends = np.cumsum([chunk.stop - chunk.start for chunk in batch.chunks])
    return [int(end) - 1 for end, chunk in zip(ends, batch.chunks) if chunk.samples]


def _decode_rows(chunks: Sequence[Chunk], pending: dict[Req, int], padding: list[Row]) -> DecodeRows:
    reqs = [chunk.req for chunk in chunks]
    pending_indices = [pending.get(req) for req in reqs]
    known = [req.tokens.last if index is None else 0 for req, index in zip(reqs, pending_indices)]
    pages = [req.page_table.ids for req in reqs if req.page_table is not None]
    assert len(pages) == len(reqs)
    count = len(padding)
    return DecodeRows(known + [0] * count, [chunk.start for chunk in chunks] + [0] * count,
                      pages + [row.page_ids for row in padding], pending_indices + [None] * count)
