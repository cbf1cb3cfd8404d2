"""Runs batches: builds the model's input, launches it, samples, and gathers log-probabilities."""

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
from ..sampling.sampled_tokens import SampledTokens, TokensOnDevice

if TYPE_CHECKING:
    from ..runner.model_runner import ModelRunner
    from ..sampling.sampler import PendingSample, Sampler


class NewToken(NamedTuple):
    """The token that a request gained in a step; the request itself is not touched yet.

    With an ``error`` it gained none, and is to be failed.
    """

    req: Req
    token_id: int
    logprobs: Logprobs | None
    error: ServingError | None = None


@dataclass(frozen=True)
class StepOutput:
    """A batch that was launched. Its results stay on the device until ``gains`` asks for them."""

    batch: ScheduledBatch
    sampled: PendingSample | TokensOnDevice
    sampling: list[Req]
    prompt_report: PromptReport | None
    hidden_report: HiddenReport | None

    def plain_tokens(self) -> list[int] | None:
        """Wait for the step: the tokens of ``sampling``, where these are all that a step of a run tells; else None, and
        ``gains`` tells more."""
        run = self.batch.input_batch
        return None if run is None or not run.all_plain else self.sampled.token_ids()

    def gains(self) -> list[NewToken]:
        """Wait for the step; a gain for each chunk that reached its request's end, in batch order."""
        if self.prompt_report is not None:
            self.prompt_report.take_in()
        if self.hidden_report is not None:
            self.hidden_report.take_in()
        sampled = self.sampled.wait()
        gains = []
        for i, (req, token_id, found) in enumerate(zip(self.sampling, sampled.token_ids, sampled.logprobs)):
            logprobs = found and Logprobs([token_id], [found.value], [found.top], [found.of_ids])
            error = None
            if token_id == FAILED:
                error = InvalidRequest(sampled.failures.get(i, "custom_logit_processor failed."))
            gains.append(NewToken(req, token_id, logprobs, error))
        return gains


class Executor:
    """One rank's model and sampler. Launched steps run in order; what one samples, the next may compute on."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, grammars: GrammarStore | None = None):
        """``grammars``: those of requests with a matcher, on the rank that chooses tokens."""
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._chosen = SampledTokens()
        self._last: StepOutput | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether ``launch`` returns before the step has run, so that the host can work meanwhile."""
        return self._runner.device.type == "cuda"

    def launch(self, batch: ScheduledBatch, after_group: AfterGroup | None = None) -> StepOutput:
        """Start computing the batch. Pending tokens are taken from the step launched before, on the device.

        ``after_group(g, event)`` is called once layer group g's keys and values are on their way into the pool;
        ``event`` (None on a CPU) tells when they are there. Where a request has a grammar, its mask is made while the
        device runs the forward pass; that needs its pending token, so that the host then waits for the step before.
        """
        if batch.input_batch is not None and batch.input_batch.all_plain:
            self._last = self._launch_run(batch, batch.input_batch)
            return self._last
        wanted = [] if batch.is_decode else prompt_rows(batch)
        sampling = batch.chunks if batch.is_decode else [chunk for chunk in batch.chunks if chunk.samples]
        rows = list(range(len(sampling))) if batch.is_decode else _last_rows(batch)
        rows += [row.index for row in wanted]
        hidden = hidden_rows(batch)
        sources = self._sources(batch)
        self._runner.meet(batch.num_tokens, len(rows), decodes=batch.is_decode and not hidden)
        logits, states = self._forward(batch, rows, hidden, sources, after_group)
        count = len(sampling)
        allowed = self._allowed(sampling, sources)
        choosing = [chunk.req.sampling_metadata(chunk.stop, sources.get(chunk.req), allowed.get(chunk.req))
                    for chunk in sampling]
        sampled = self._sampler.launch(logits[:count], choosing, self._previous)
        report = PromptReport(wanted, logits[count:count + len(wanted)]) if wanted else None
        step = StepOutput(batch, sampled, [chunk.req for chunk in sampling], report,
                          HiddenReport(hidden, states) if hidden else None)
        self._last = step
        return step

    def _launch_run(self, batch: ScheduledBatch, run: InputBatch) -> StepOutput:
        last = self._last
        goes_on = last is not None and last.sampling is run.reqs
        token_ids = last.sampled.tokens if last is not None and goes_on else self._newest_tokens(run)
        self._runner.meet(len(run), len(run), decodes=True)
        logits, likeliest = self._runner.decode(run.decode_table(), token_ids)
        # The logits are whole on every rank, each shard of them one rank's bits: all have found the same tokens.
        tokens = (likeliest if run.all_greedy and likeliest is not None else
                  self._sampler.draw(logits, run.sampling_metadata()))
        return StepOutput(batch, self._chosen.of(tokens), run.reqs, None, None)

    def _newest_tokens(self, run: InputBatch) -> torch.Tensor:
        """The last token [B] int64 of each request, on the device."""
        last, device = self._last, self._runner.device
        follows = last is not None and last.sampling is run.previous_reqs
        known, pending = run.last_tokens(reused_on_device=follows)
        sources = run.reused_rows.tolist() if follows else []
        rows = list(range(len(sources)))
        if pending:
            assert last is not None, "a pending token comes from a step"
            found = {req: place for place, req in enumerate(last.sampling)}
            sources, rows = sources + [found[run.reqs[place]] for place in pending], rows + pending
        if last is None or not rows:
            return upload(known, torch.int64, device)
        if len(rows) == len(known):
            return last.sampled.tokens[upload(sources, torch.int64, device)]
        token_ids = upload(known, torch.int64, device)
        places, sources_there = upload([rows, sources], torch.int64, device)
        token_ids[places] = last.sampled.tokens[sources_there]
        return token_ids

    def forward(self, batch: ScheduledBatch, after_group: AfterGroup | None = None) -> None:
        """``launch`` on a stage before the last one, which has no logits to choose by. No token may be pending."""
        self._runner.forward(self._build(batch, [], {}, padded=False), after_group)

    def accompany(self) -> None:
        """There is no batch in this turn: take part in what other data-parallel ranks compute."""
        self._runner.accompany()

    def event(self) -> torch.cuda.Event | None:
        """An event that happens when all launched steps have run; None where launching is computing."""
        if not self.asynchronous:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @property
    def _previous(self) -> torch.Tensor | None:
        """The tokens that the step before chose."""
        return None if self._last is None else self._last.sampled.tokens

    def _sources(self, batch: ScheduledBatch) -> dict[Req, int]:
        """Where requests with a pending token find it among ``_previous``."""
        pending = [chunk.req for chunk in batch.chunks if chunk.stop > chunk.req.tokens.count]
        if not pending:
            return {}
        assert self._last is not None, "a pending token comes from a step"
        places = dict(zip(self._last.sampling, range(len(self._last.sampling))))
        if pending == self._last.sampling:  # a decode batch that goes on: requests are compared by identity
            return places
        return {req: places[req] for req in pending}

    def _allowed(self, chunks: Sequence[Chunk], sources: dict[Req, int]) -> dict[Req, FillAllowed]:
        """The masks of requests whose next token is bound by a grammar."""
        bound = [(chunk.req, chunk.req.matcher) for chunk in chunks if chunk.req.matcher is not None]
        if not bound:
            return {}
        assert self._grammars is not None
        chosen = self._last.sampled.token_ids() if self._last and any(req in sources for req, _ in bound) else []
        live = [(req, matcher) for req, matcher in bound
                if matcher.advance(chosen[sources[req]] if req in sources else None)]
        return dict(zip([req for req, _ in live], self._grammars.fill([matcher for _, matcher in live])))

    def _forward(self, batch: ScheduledBatch, rows: list[int], wanted: list[HiddenRows], sources: dict[Req, int],
                 after_group: AfterGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of ``rows``, and the hidden states that are ``wanted``."""
        if not wanted:
            logits = self._runner.forward(self._build(batch, rows, sources), after_group)
            return logits, logits[:0]
        indices = rows + [row for one in wanted for row in range(one.first, one.stop)]
        built = self._build(batch, indices, sources, padded=False)
        return self._runner.forward_with_hidden(built, len(rows), after_group)

    def _build(self, batch: ScheduledBatch, logits_rows: list[int], sources: dict[Req, int], *,
               padded: bool = True) -> ForwardBatch:
        """``padded``: to a size that a CUDA graph was captured for."""
        runner, page_size = self._runner, self._runner.layout.page_size
        if batch.is_decode and not any(chunk.req.embeds is not None for chunk in batch.chunks):
            padding = runner.padding(len(batch.chunks)) if padded else []
            return build_decode_batch(_decode_rows(batch.chunks, sources, padding), page_size, runner.device,
                                      logits_rows, self._previous)
        rows = []
        for chunk in batch.chunks:
            req = chunk.req
            assert req.page_table is not None
            pages = req.page_table.ids[:-(-chunk.stop // page_size)]
            embeds = None if req.embeds is None else req.embeds[chunk.start:chunk.stop]
            rows.append(Row(req.tokens.view(chunk.start, chunk.stop), chunk.start, pages, sources.get(req),
                            embeds if embeds is not None and len(embeds) else None))
        if batch.is_decode and padded:
            rows += runner.padding(len(rows))
        return build_forward_batch(rows, page_size, runner.device, batch.is_decode, logits_rows, self._previous)


def _last_rows(batch: ScheduledBatch) -> list[int]:
    """Of the batch's token rows, those whose logits choose a token."""
    ends = np.cumsum([chunk.stop - chunk.start for chunk in batch.chunks])
    return [int(end) - 1 for end, chunk in zip(ends, batch.chunks) if chunk.samples]


def _decode_rows(chunks: Sequence[Chunk], sources: dict[Req, int], padding: list[Row]) -> DecodeRows:
    reqs = [chunk.req for chunk in chunks]
    places = [sources.get(req) for req in reqs]
    known = [req.tokens.last if place is None else 0 for req, place in zip(reqs, places)]
    pages = [req.page_table.ids for req in reqs if req.page_table is not None]
    assert len(pages) == len(reqs)
    count = len(padding)
    return DecodeRows(known + [0] * count, [chunk.start for chunk in chunks] + [0] * count,
                      pages + [row.page_ids for row in padding], places + [None] * count)
