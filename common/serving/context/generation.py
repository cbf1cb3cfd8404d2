"""The generations of one HTTP request: sent to the engine, detokenized, measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import msgspec
from msgspec import UNSET

from ...api.errors import AbortRequested, ServingError
from ...api.messages import Generate, LatencySpan, Logprobs, Output, OutputExtras, PromptUsage, SpanName
from ...engine_client.client import EngineClient
from ...engine_client.output_stream import OutputStream
from ...obs.metrics import ServerMetrics
from ...tokenizer.text_stream import TextStream
from ...tokenizer.tokenizer import Tokenizer
from ..protocol.logprobs import joined
from ..protocol.usage import CachedTokensDetails, CompletionTokensDetails, Usage
from .draft_counts import DraftCounts, Speculation
from .request_export import RequestExport
from .request_log import RequestLog
from .time_stats import TimeStats
from .traces import Traces


@dataclass(frozen=True)
class ChoiceFinish:
    """The reason why a choice ended; ``matched`` is the stop token or stop string."""

    reason: str
    matched: int | str | None = None


@dataclass
class Delta:
    """A choice's output since its last delta."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


class Choice:
    """One generation as its outputs arrive: totals, and the delta since the last ``take_delta``."""

    def __init__(self, index: int, request: Generate, text_stream: TextStream, metrics: ServerMetrics, arrived: float,
                 drafts: DraftCounts | None = None, weight_version: Callable[[], str] = lambda: "default"):
        """``drafts``: on a server that verifies drafts. ``weight_version`` names the weights of now."""
        self.index = index
        self.rid = request.rid
        self.request = request
        self.arrived = arrived
        self.finish: ChoiceFinish | None = None
        self.latency = 0.0
        self.first_token_seconds: float | None = None
        """From arrival to the first token; None before."""
        self._num_continued = 0
        self.num_prompt_tokens = len(request.input_ids)
        self.num_cached_tokens = 0
        self.cached_tokens_details: CachedTokensDetails | None = None
        self.num_output_tokens = 0
        self.prompt_logprobs: Logprobs | None = None
        self.stages: list[LatencySpan] = []
        self.speculation: Speculation | None = None
        self.embedding: bytes | None = None
        self.hidden_states: list[bytes] = []
        self.routed_experts: list[bytes] = []
        self._total = Delta()
        self._texts: list[str] = []
        self._new = Delta()
        self._text_stream = text_stream
        self._metrics = metrics
        self._drafts = drafts
        self._weight_version = weight_version
        self.weight_versions: list[tuple[str, int]] = []
        """The weights that sampled its output, each with a number of tokens; without what another server answered."""
        self._last = 0.0
        self._usage = PromptUsage(0, 0)  # as the engine counts: continued output is part of the prompt

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def token_ids(self) -> list[int]:
        return self._total.token_ids

    @property
    def prompt_ids(self) -> list[int]:
        """The client's prompt, without output that another server sent."""
        ids = self.request.input_ids
        return ids[:len(ids) - self.request.num_answered]

    @property
    def logprobs(self) -> Logprobs | None:
        return joined(self._total.logprobs)

    @property
    def num_new_tokens(self) -> int:
        """Tokens since ``take_delta``."""
        return len(self._new.token_ids)

    @property
    def started(self) -> bool:
        """True once ``take_delta`` was called."""
        return self.num_output_tokens > len(self._new.token_ids)

    def take_delta(self) -> Delta:
        delta, self._new = self._new, Delta()
        return delta

    def visible(self, logprobs: Logprobs | None) -> Logprobs | None:
        """Logprobs that end with the answer's last token, without the stop token that its text leaves out."""
        matched = self.finish.matched if self.finish else None
        trimmed = isinstance(matched, int) and not self.request.sampling.no_stop_trim
        if logprobs is None or not trimmed or not logprobs.token_ids or logprobs.token_ids[-1] != matched:
            return logprobs
        return Logprobs(logprobs.token_ids[:-1], logprobs.values[:-1], logprobs.top[:-1], logprobs.of_ids[:-1])

    def resume_after(self, token_ids: Sequence[int]) -> None:
        """Continues output that another server answered: it counts as this choice's, but is not new.

        The engine has these tokens at the end of its prompt (see ``continue_after``).
        """
        assert not self.num_output_tokens
        self._num_continued = self.num_output_tokens = len(token_ids)
        self.num_prompt_tokens -= len(token_ids)
        self._texts.append(self._text_stream.push(token_ids, None))
        self._total.token_ids.extend(token_ids)

    def take(self, output: Output) -> None:
        """Adds one output of the engine; the last one sets ``finish``."""
        _, token_ids, extras, num_drafts = output
        finish = None if extras is None else extras.finish
        if len(token_ids) > 1 and self._text_stream.may_match:
            text, token_ids, extras = self._push_run(token_ids, extras)
        else:
            text = self._text_stream.push(token_ids, finish)
        self.num_output_tokens += len(token_ids)
        self._count_version(len(token_ids))
        if extras is not None:
            self._take_extras(extras)
        self._measure(len(token_ids))
        if num_drafts and self._drafts is not None:
            self._drafts.add(num_drafts, len(token_ids))
        if text:
            self._texts.append(text)
            self._new.text += text
        self._total.token_ids.extend(token_ids)
        self._new.token_ids.extend(token_ids)
        if self._text_stream.matched is not None:
            self._finish(ChoiceFinish("stop", self._text_stream.matched))
        elif finish is not None:
            self._finish(ChoiceFinish(finish.reason, finish.matched))

    @property
    def ended_stages(self) -> list[LatencySpan]:
        """The stages that the engine has reported, and the one during which the answer ends, now: a stop string may
        end it here."""
        last: SpanName = "transfer" if self.request.sends_kv else "decode"
        return [*self.stages, LatencySpan(last, time.monotonic())] if self.stages else []

    @property
    def weight_version(self) -> str:
        """The weights that sampled its last token; those of now where there is none."""
        return self.weight_versions[-1][0] if self.weight_versions else self._weight_version()

    def _count_version(self, num_tokens: int) -> None:
        version, versions = self._weight_version(), self.weight_versions
        if versions and versions[-1][0] == version:
            versions[-1] = version, versions[-1][1] + num_tokens
        elif num_tokens:
            versions.append((version, num_tokens))

    def _push_run(self, token_ids: list[int],
                  extras: OutputExtras | None) -> tuple[str, list[int], OutputExtras | None]:
        """Detokenizes tokens of one step up to the one that ends the text by a stop string, as if each were of its own
        step; returns the text, these tokens, and their part of ``extras``."""
        finish = None if extras is None else extras.finish
        texts, count = [], 0
        for count, token_id in enumerate(token_ids, 1):
            texts.append(self._text_stream.push([token_id], finish if count == len(token_ids) else None))
            if self._text_stream.matched is not None:
                break
        if extras is not None and count < len(token_ids):
            extras = _first_of_run(extras, count, len(token_ids))
        return "".join(texts), token_ids[:count], extras

    def _take_extras(self, extras: OutputExtras) -> None:
        if (usage := extras.usage) is not None:
            self.num_prompt_tokens = usage.num_tokens - self._num_continued
            self.num_cached_tokens = min(usage.num_cached_tokens, self.num_prompt_tokens)
            if self.num_cached_tokens:
                self.cached_tokens_details = CachedTokensDetails.of(usage, self.num_cached_tokens)
            self._usage = usage
        if extras.prompt_logprobs is not None:
            self.prompt_logprobs = extras.prompt_logprobs
        if extras.logprobs is not None:
            self._total.logprobs.append(extras.logprobs)
            self._new.logprobs.append(extras.logprobs)
        if extras.embedding is not None:
            self.embedding = extras.embedding
            self._count_prompt()
        if extras.hidden_states:
            self.hidden_states.append(extras.hidden_states)
        if extras.routed_experts:
            self.routed_experts.append(extras.routed_experts)
        self.stages += extras.spans

    def _measure(self, count: int) -> None:
        """Observes the latency of ``count`` new tokens."""
        if not count:
            return
        now = time.monotonic()
        if self._last:
            gap = (now - self._last) / count
            for _ in range(count):
                self._metrics.itl.observe(gap)
        else:
            self.first_token_seconds = now - self.arrived
            self._metrics.ttft.observe(self.first_token_seconds)
            self._count_prompt()
        self._metrics.generation_tokens.inc(count)
        self._last = now

    def _count_prompt(self) -> None:
        self._metrics.prompt_tokens.inc(self._usage.num_tokens)
        self._metrics.cached_tokens.inc(self._usage.num_cached_tokens)

    def _finish(self, finish: ChoiceFinish) -> None:
        self.finish = finish
        self.latency = time.monotonic() - self.arrived
        self._metrics.observe_end(self.latency, self.num_prompt_tokens, self.num_output_tokens)
        self._metrics.count_outcome(finish.reason)
        self._count_objectives()
        if self._drafts is not None:
            self.speculation = self._drafts.report(self.num_output_tokens - self._num_continued)
            if (calls := self._metrics.spec_verify_calls) is not None:
                calls.inc(self.speculation.num_steps)


    def _count_objectives(self) -> None:
        """Counts whether the latencies are those that the request wants; a prompt that another server asked for has
        none of its own."""
        request, first = self.request, self.first_token_seconds
        if request.sends_kv or first is None:
            return
        if request.slo_ttft is not None:
            self._metrics.count_objective("ttft", first <= request.slo_ttft)
        later = self.num_output_tokens - self._num_continued - 1
        if request.slo_tpot is not None and later > 0:
            self._metrics.count_objective("tpot", self.latency - first <= request.slo_tpot * later)


class Generation:
    """All choices of one HTTP request. Use as a context manager: leaving it aborts what has not ended."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, metrics: ServerMetrics, requests: Sequence[Generate],
                 arrived: float, continued: Sequence[int] = (), request_log: RequestLog | None = None,
                 traces: Traces | None = None, count_drafts: Callable[[], DraftCounts | None] = lambda: None,
                 weight_version: Callable[[], str] = lambda: "default", time_stats: TimeStats | None = None,
                 request_export: RequestExport | None = None):
        """``arrived``: the HTTP request's arrival, on the monotonic clock in seconds. ``continued``: output of the only
        choice that another server answered. ``count_drafts`` makes the counts of a choice's drafts,
        ``weight_version`` names the weights of now."""
        self._metrics = metrics
        self._request_log = request_log
        self._traces = traces
        self._time_stats = time_stats
        self._request_export = request_export
        self._requests = requests
        self._arrived = arrived
        self._stream: OutputStream = client.open(requests)
        self.choices = [Choice(index, request, tokenizer.text_stream(request.sampling), metrics, arrived,
                               count_drafts(), weight_version) for index, request in enumerate(requests)]
        if continued:
            self.choices[0].resume_after(continued)
        self._by_rid = {choice.rid: choice for choice in self.choices}
        self._failure: str | None = None  # the code of the error that ended it

    def __enter__(self) -> Generation:
        if self._request_log is not None:
            self._request_log.start(self._requests)
        if self._traces is not None:
            self._traces.start(self._requests, self._arrived)
        if self._time_stats is not None:
            self._time_stats.start(self._requests)
        try:
            self._stream.__enter__()
        except ServingError as error:
            self._end(error.code)
            raise
        return self

    async def _next(self) -> list[Choice]:
        """Waits for output; returns the choices that it belongs to."""
        try:
            return self._take(await self._stream.next())
        except ServingError as error:
            self._failure = error.code
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stream.__exit__(kind, error, trace)
        self._end(self._failure or _outcome(error))

    def _end(self, outcome: str) -> None:
        """``outcome`` is counted for choices that have not finished by themselves."""
        for choice in self.choices:
            reached = choice.finish.reason if choice.finish else outcome
            if choice.finish is None:
                self._metrics.count_outcome(outcome)
            if self._request_log is not None:
                self._request_log.end(choice.rid, reached, num_output_tokens=choice.num_output_tokens,
                                      text=choice.text, seconds=time.monotonic() - self._arrived)
            if self._traces is not None:
                self._traces.end(choice.rid, reached, arrived=self._arrived, stages=choice.ended_stages,
                                 num_output_tokens=choice.num_output_tokens)
            if self._time_stats is not None:
                self._time_stats.end(choice.rid, reached, arrived=self._arrived, stages=choice.ended_stages,
                                     num_prompt_tokens=choice.num_prompt_tokens,
                                     num_output_tokens=choice.num_output_tokens)
            if self._request_export is not None:
                self._request_export.end(choice.request, reached, seconds=time.monotonic() - self._arrived,
                                         num_prompt_tokens=choice.num_prompt_tokens,
                                         num_cached_tokens=choice.num_cached_tokens,
                                         num_output_tokens=choice.num_output_tokens,
                                         first_token_seconds=choice.first_token_seconds,
                                         weight_version=choice.weight_version)

    @property
    def live(self) -> bool:
        """True while more output is to come."""
        return self._stream.live

    async def complete(self) -> list[Choice]:
        """The choices, when all have ended; raises the ServingError of one that fails."""
        while self._stream.live:
            await self._next()
        return self.choices

    async def deltas(self, intervals: Sequence[int]) -> AsyncIterator[list[Choice]]:
        """Choices that have something new, when that is at least as many tokens as their ``intervals`` say, a choice's
        first, or its end."""
        while self._stream.live:
            due = [choice for choice in await self._next()
                   if choice.finish or not choice.started or choice.num_new_tokens >= intervals[choice.index]]
            if due:
                yield due

    def _take(self, outputs: list[Output]) -> list[Choice]:
        updated: dict[int, Choice] = {}
        for output in outputs:
            choice = self._by_rid[output.rid]
            if choice.finish is not None:  # outputs of the same batch, after a stop string
                continue
            choice.take(output)
            updated[choice.index] = choice
            if choice.finish is not None and output.finish is None:
                self._stream.abort(choice.rid)
        return list(updated.values())


def _first_of_run(extras: OutputExtras, count: int, num_tokens: int) -> OutputExtras:
    """Returns the report of the first ``count`` of a step's ``num_tokens`` tokens, which ends nothing."""
    logprobs, states = extras.logprobs, extras.hidden_states
    if logprobs is not None:
        logprobs = Logprobs(logprobs.token_ids[:count], logprobs.values[:count], logprobs.top[:count],
                            logprobs.of_ids[:count])
    if states is not None:
        states = states[:len(states) // num_tokens * count]
    return msgspec.structs.replace(extras, logprobs=logprobs, hidden_states=states, finish=None)


def refuse_aborted(reasons: Iterable[str | None]) -> None:
    """Raises AbortRequested for a finish reason "abort", for APIs whose answers cannot be partial."""
    if "abort" in reasons:
        raise AbortRequested("The request was aborted.")


def _outcome(error: BaseException | None) -> str:
    """The outcome of a request that the engine neither finished nor failed."""
    if error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit, ConnectionError)):
        return "disconnected"
    return ServingError.code


def usage_of(choices: Sequence[Choice], n: int, *, report_cached: bool) -> Usage:
    """A prompt counts once for its ``n`` choices, with the cached tokens of the first; see --enable-cache-report."""
    firsts = choices[::n]
    usage = Usage.of(
        prompt_tokens=sum(choice.num_prompt_tokens for choice in firsts),
        cached_tokens=sum(choice.num_cached_tokens for choice in firsts) if report_cached else None,
        completion_tokens=sum(choice.num_output_tokens for choice in choices))
    if reports := [choice.speculation for choice in choices if choice.speculation is not None]:
        accepted = sum(report.num_accepted for report in reports)
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(report.num_drafts for report in reports) - accepted,
            simulated_acceptance=True if any(report.simulated for report in reports) else UNSET)
    return usage
