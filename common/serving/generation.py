"""One HTTP request's generations: sent to the engine, turned into text, measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ..api.errors import AbortRequested, ServingError
from ..api.messages import Generate, LatencySpan, Logprobs, Output
from ..engine_client.client import EngineClient
from ..engine_client.output_stream import OutputStream
from ..obs.metrics import ServerMetrics
from ..tokenizer.text_stream import TextStream
from ..tokenizer.tokenizer import Tokenizer
from .lifecycle.request_log import RequestLog
from .lifecycle.traces import Traces
from .protocol.logprobs import joined


@dataclass(frozen=True)
class Ended:
    """Why a choice ended; ``matched`` is the stop token or stop string."""

    reason: str
    matched: int | str | None = None


@dataclass
class Delta:
    """What a choice gained since it was last looked at."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


class Choice:
    """One generation as its outputs arrive: totals, and what is new."""

    def __init__(self, index: int, request: Generate, text_stream: TextStream, metrics: ServerMetrics, arrived: float):
        self.index = index
        self.rid = request.rid
        self.request = request
        self.arrived = arrived
        self.ended: Ended | None = None
        self.latency = 0.0
        self._num_continued = 0
        self.num_prompt_tokens = len(request.input_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.prompt_logprobs: Logprobs | None = None
        self.stages: list[LatencySpan] = []
        self.embedding: bytes | None = None
        self.hidden_states: list[bytes] = []
        self._total = Delta()
        self._texts: list[str] = []
        self._new = Delta()
        self._text_stream = text_stream
        self._metrics = metrics
        self._last = 0.0

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def token_ids(self) -> list[int]:
        return self._total.token_ids

    @property
    def logprobs(self) -> Logprobs | None:
        return joined(self._total.logprobs)

    @property
    def num_new_tokens(self) -> int:
        """Tokens gained since ``take_delta``."""
        return len(self._new.token_ids)

    @property
    def started(self) -> bool:
        """Whether ``take_delta`` was called before."""
        return self.num_output_tokens > len(self._new.token_ids)

    def take_delta(self) -> Delta:
        delta, self._new = self._new, Delta()
        return delta

    def visible(self, logprobs: Logprobs | None) -> Logprobs | None:
        """Logprobs that end with the answer's last token, without the stop token that its text leaves out."""
        matched = self.ended.matched if self.ended else None
        trimmed = isinstance(matched, int) and not self.request.sampling.no_stop_trim
        if logprobs is None or not trimmed or not logprobs.token_ids or logprobs.token_ids[-1] != matched:
            return logprobs
        return Logprobs(logprobs.token_ids[:-1], logprobs.values[:-1], logprobs.top[:-1], logprobs.of_ids[:-1])

    def go_on_after(self, token_ids: Sequence[int]) -> None:
        """Begin behind output that was answered elsewhere: it counts as this choice's, but is not new.

        The engine has these tokens at the end of its prompt (see ``continue_after``).
        """
        assert not self.num_output_tokens
        self._num_continued = self.num_output_tokens = len(token_ids)
        self.num_prompt_tokens -= len(token_ids)
        self._texts.append(self._text_stream.push(token_ids, None))
        self._total.token_ids.extend(token_ids)

    def take(self, output: Output) -> None:
        """Add one output of the engine; sets ``ended`` with the last."""
        self._measure(output)
        text = self._text_stream.push(output.token_ids, output.finish)
        self.num_prompt_tokens = output.num_prompt_tokens - self._num_continued
        self.num_cached_tokens = min(output.num_cached_tokens, self.num_prompt_tokens)
        self.num_output_tokens = output.num_output_tokens + self._num_continued
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.stages += output.spans
        self.embedding = output.embedding or self.embedding
        if output.hidden_states:
            self.hidden_states.append(output.hidden_states)
        if text:
            self._texts.append(text)
            self._new.text += text
        for part in (self._total, self._new):
            part.token_ids.extend(output.token_ids)
            if output.logprobs is not None:
                part.logprobs.append(output.logprobs)
        if self._text_stream.matched is not None:
            self._end(Ended("stop", self._text_stream.matched))
        elif output.finish is not None:
            self._end(Ended(output.finish.reason, output.finish.matched))

    def _measure(self, output: Output) -> None:
        if output.embedding is not None:
            self._metrics.prompt_tokens.inc(output.num_prompt_tokens)
            self._metrics.cached_tokens.inc(output.num_cached_tokens)
        if not output.token_ids:
            return
        now = time.monotonic()
        if self._last:
            gap = (now - self._last) / len(output.token_ids)
            for _ in output.token_ids:
                self._metrics.itl.observe(gap)
        else:
            self._metrics.ttft.observe(now - self.arrived)
            self._metrics.prompt_tokens.inc(output.num_prompt_tokens)
            self._metrics.cached_tokens.inc(output.num_cached_tokens)
        self._metrics.generation_tokens.inc(len(output.token_ids))
        self._last = now

    def _end(self, ended: Ended) -> None:
        self.ended = ended
        self.latency = time.monotonic() - self.arrived
        self._metrics.e2e.observe(self.latency)
        self._metrics.ended(ended.reason)


class Generation:
    """All choices of one HTTP request. Use as a context manager: leaving it aborts what has not ended."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, metrics: ServerMetrics, requests: Sequence[Generate],
                 arrived: float, continued: Sequence[int] = (), journal: RequestLog | None = None,
                 traces: Traces | None = None):
        """``arrived``: when the HTTP request came, on the monotonic clock in seconds. ``continued``: output of the only
        choice that was answered elsewhere."""
        self._metrics = metrics
        self._journal = journal
        self._traces = traces
        self._requests = requests
        self._arrived = arrived
        self._stream: OutputStream = client.open(requests)
        self.choices = [Choice(index, request, tokenizer.text_stream(request.sampling), metrics, arrived)
                        for index, request in enumerate(requests)]
        if continued:
            self.choices[0].go_on_after(continued)
        self._by_rid = {choice.rid: choice for choice in self.choices}
        self._failure: str | None = None  # the code of the error that ended it

    def __enter__(self) -> Generation:
        if self._journal is not None:
            self._journal.began(self._requests)
        if self._traces is not None:
            self._traces.began(self._requests, self._arrived)
        try:
            self._stream.__enter__()
        except ServingError as error:
            self._end(error.code)
            raise
        return self

    async def _gain(self) -> list[Choice]:
        """Choices that gained something; waits for a first one."""
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
        """``outcome`` is that of the choices that have not ended by themselves."""
        for choice in self.choices:
            reached = choice.ended.reason if choice.ended else outcome
            if choice.ended is None:
                self._metrics.ended(outcome)
            if self._journal is not None:
                self._journal.ended(choice.rid, reached, num_output_tokens=choice.num_output_tokens, text=choice.text,
                                    seconds=time.monotonic() - self._arrived)
            if self._traces is not None:
                self._traces.ended(choice.rid, reached, arrived=self._arrived, stages=choice.stages,
                                   num_output_tokens=choice.num_output_tokens)

    @property
    def live(self) -> bool:
        """Whether more is to come."""
        return self._stream.live

    async def complete(self) -> list[Choice]:
        """The choices, when all have ended; raises the ServingError of one that fails."""
        while self._stream.live:
            await self._gain()
        return self.choices

    async def deltas(self, interval: int) -> AsyncIterator[list[Choice]]:
        """Choices that have something new, when that is at least ``interval`` tokens, a choice's first, or its end."""
        while self._stream.live:
            ripe = [choice for choice in await self._gain()
                    if choice.ended or not choice.started or choice.num_new_tokens >= interval]
            if ripe:
                yield ripe

    def _take(self, outputs: list[Output]) -> list[Choice]:
        gained: dict[int, Choice] = {}
        for output in outputs:
            choice = self._by_rid[output.rid]
            if choice.ended is not None:  # outputs of the same batch behind a stop string
                continue
            choice.take(output)
            gained[choice.index] = choice
            if choice.ended is not None and output.finish is None:
                self._stream.abort(choice.rid)
        return list(gained.values())


def refuse_aborted(reasons: Iterable[str | None]) -> None:
    """For answers that have no place for a part of themselves: raises AbortRequested where a finish reason is abort."""
    if "abort" in reasons:
        raise AbortRequested("The request was aborted.")


def _outcome(error: BaseException | None) -> str:
    """How a request ended that the engine neither finished nor failed."""
    if error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit, ConnectionError)):
        return "disconnected"
    return ServingError.code
