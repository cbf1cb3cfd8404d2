"""Simulation of a server: the real unified scheduler, batcher and pipeline on a virtual clock. A cost model gives the
time of a step, and of the API server and a client in one process each. Only seeds make anything random; half a minute
of load takes less than a second.

Times are in milliseconds. ``H200`` is a Llama-3-8B shape in bf16 as measured (tests/bench/results/2026-11-21-*.md).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.common.api.messages import FromEngine, Generate, OutputBatch
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ScheduleArgs
from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request.step_input import StepInput
from baton.common.request.step_output import StepOutput
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.request_tracker import RequestTracker

PAGE = 16


@dataclass(frozen=True)
class Costs:
    """Costs in milliseconds. A decode step of b requests with n tokens in total takes ``step + b * row + n * context``,
    a prefill step ``start + tokens * prompt``, and a mixed step ``mixed`` times their sum. ``host_*``: the host's time
    to launch them. ``api_server_*`` and ``client_*``: time for a token, and for a request until the engine has it."""

    step: float = 4.2
    row: float = 0.0178
    context: float = 2.848e-5
    start: float = 0.7
    prompt: float = 1 / 43.2
    mixed: float = 0.95
    host_decode: float = 0.37
    host_prompt: float = 6.0
    api_server_token: float = 0.012
    client_token: float = 0.03
    api_server_request: float = 0.6
    client_request: float = 0.5

    def decode(self, reqs: int, tokens: int) -> float:
        return self.step + reqs * self.row + tokens * self.context

    def of(self, step: StepInput) -> float:
        first = step.num_prefill
        prompts = int(step.q_lens[:first].sum())
        total = self.start + prompts * self.prompt if prompts else 0.0
        if step.num_decode_rows:
            total += self.decode(step.num_decode_rows, int((step.starts + step.q_lens)[first:].sum()))
        return total * (self.mixed if prompts and step.num_decode_rows else 1.0)


H200 = Costs()


@dataclass(frozen=True)
class Ran:
    """A step on the device: its prompt tokens, the prompts that it completes, and its decode rows."""

    begin: float
    end: float
    tokens: int
    prompts: int
    decoded: int


@dataclass
class Asked:
    """A request as its client sees it: the times when it was sent and when each token arrived."""

    number: int
    input_len: int
    output_len: int
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(self.tokens)


@dataclass(frozen=True)
class _Step:
    """An executor's step, whose tokens are known at time ``end``."""

    server: SimulatedServer
    step: StepInput
    end: float

    def wait(self) -> StepOutput:
        self.server.wait_until(self.end)
        count = len(self.step.sample_index)
        return StepOutput(self.step.sample_index, [1] * count, [9] * count)


class _Queue:
    """A process that works on one item after the other."""

    def __init__(self) -> None:
        self._free = 0.0

    def done(self, now: float, takes: float) -> float:
        self._free = max(now, self._free) + takes
        return self._free


class SimulatedServer:
    """One engine, its API server, and a client process."""

    def __init__(self, args: ScheduleArgs, costs: Costs = H200, *, pool_tokens: int = 800_000, **batcher: Any):
        """Overlap is on; prompts share no prefix. ``batcher``: further arguments of Batcher."""
        self.now = 0.0
        self.ran: list[Ran] = []
        self.asked: list[Asked] = []
        self._costs = costs
        self._device_free = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._inbox: list[Asked] = []
        self._by_rid: dict[str, Asked] = {}
        self._api_server, self._client = _Queue(), _Queue()
        self._ended: Callable[[float], None] = lambda now: None
        self.tracker = RequestTracker(self._send, eos_ids=frozenset({1}), vocab_size=1 << 31,
                                      max_request_tokens=1 << 20, max_requests=1 << 20, timeout=1e9)
        self.batcher = Batcher(KVCacheManager(pool_tokens // PAGE, PAGE, False), args, **batcher)
        self.scheduler = UnifiedScheduler(self.batcher, self, self.tracker, overlap=True)  # type: ignore[arg-type]

    # -- Executor's interface -------------------------------------------------------------------

    asynchronous = True

    def launch(self, step: StepInput, after_group: None = None) -> _Step:
        prompts = step.num_prefill
        self.now += self._costs.host_prompt if prompts else self._costs.host_decode
        begin = max(self._device_free, self.now - (self._costs.host_prompt if prompts else 0.0))
        self._device_free = end = max(begin + self._costs.of(step), self.now)
        completed = int(step.num_samples[:prompts].sum())
        self.ran.append(Ran(begin, end, int(step.q_lens[:prompts].sum()), completed, step.num_decode_rows))
        return _Step(self, step, end)

    def run_idle_batch(self) -> None:
        """There are no other data-parallel ranks."""

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)

    # -- loads -----------------------------------------------------------------------------------

    def closed_loop(self, requests: int, clients: int, input_len: int, output_len: int) -> None:
        """Send ``clients`` requests at a time; ends when all are answered."""
        waiting = iter([Asked(i, input_len, output_len) for i in range(requests)])

        def send_next(now: float) -> None:
            if (asked := next(waiting, None)) is not None:
                self._ask(now, asked)

        self._ended = send_next
        for _ in range(clients):
            send_next(0.0)
        self._run()

    def open_loop(self, requests: int, rate: float, input_len: int, output_len: int, seed: int = 0) -> None:
        """Send requests at Poisson arrivals, ``rate`` a second."""
        times = np.cumsum(np.random.default_rng(seed).exponential(1e3 / rate, requests))
        self.at_times([(time, input_len, output_len) for time in times])

    def at_times(self, due: Sequence[tuple[float, int, int]]) -> None:
        """Send requests ``(time, input tokens, output tokens)``."""
        for i, (time, input_len, output_len) in enumerate(due):
            asked = Asked(i, input_len, output_len)
            self._later(time, lambda now, asked=asked: self._ask(now, asked))
        self._run()

    # -- the machinery ---------------------------------------------------------------------------

    def _ask(self, now: float, asked: Asked) -> None:
        self._by_rid[str(asked.number)] = asked
        self.asked.append(asked)
        asked.sent = now
        leaves = self._client.done(now, self._costs.client_request)
        self._later(leaves, lambda now: self._later(self._api_server.done(now, self._costs.api_server_request),
                                                    lambda _: self._inbox.append(asked)))

    def _later(self, time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def _happen(self) -> None:
        """Run all events outside of the engine up to now."""
        while self._events and self._events[0][0] <= self.now:
            time, _, what = heapq.heappop(self._events)
            what(time)

    def _send(self, message: FromEngine) -> None:
        assert isinstance(message, OutputBatch)
        sent = [(output.rid, output.finish is not None) for output in message.rows()]
        self._later(self.now, lambda now: self._deliver(now, sent))

    def _deliver(self, now: float, sent: list[tuple[str, bool]]) -> None:
        for rid, ends in sent:
            leaves = self._api_server.done(now, self._costs.api_server_token)
            asked = self._by_rid[rid]
            self._later(leaves, lambda at, asked=asked, ends=ends: self._arrive(at, asked, ends))

    def _arrive(self, now: float, asked: Asked, ends: bool) -> None:
        now = self._client.done(now, self._costs.client_token)
        asked.tokens.append(now)
        if ends:
            assert len(asked.tokens) == asked.output_len
            self._later(now, self._ended)

    def _run(self) -> None:
        while True:
            self._happen()
            for asked in self._inbox:
                self._add(asked)
            self._inbox.clear()
            before = len(self.ran)
            busy = self.scheduler.step(self.now / 1e3)
            self.tracker.flush()
            if not busy and len(self.ran) == before:
                if self._events:
                    wake = self._events[0][0] if self.scheduler.idle else min(self._events[0][0], self.now + 1.0)
                    self.now = max(self.now, wake)
                elif self.scheduler.idle:
                    return
                else:
                    self.now += 1.0  # an idle loop polls again after a millisecond

    def _add(self, asked: Asked) -> None:
        params = SamplingParams(max_new_tokens=asked.output_len, ignore_eos=True)
        req = self.tracker.accept(Generate(str(asked.number), [5] * asked.input_len, params), self.now / 1e3)
        assert req is not None
        self.scheduler.add(req)

    # -- results ---------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """The relay bench's columns, in requests a second and milliseconds."""
        ttft = np.array([asked.ttft for asked in self.asked])
        gaps = np.concatenate([asked.gaps for asked in self.asked])
        tpot = [asked.gaps.mean() for asked in self.asked if len(asked.gaps)]
        last = max(asked.tokens[-1] for asked in self.asked)

        def of(values: Any, percent: int) -> float:
            return float(np.percentile(values, percent)) if len(values) else 0.0

        return {"req_s": 1e3 * len(self.asked) / (last - min(asked.sent for asked in self.asked)),
                "ttft_p50": of(ttft, 50), "ttft_p99": of(ttft, 99), "tpot_p50": of(tpot, 50),
                "itl_p50": of(gaps, 50), "itl_p99": of(gaps, 99), "itl_max": float(gaps.max(initial=0.0))}

    def interruptions(self) -> Iterator[tuple[int, int, int]]:
        """Yields, for each run of prefill steps between decode steps, the requests that decode after it, its tokens and
        its steps."""
        tokens = steps = 0
        for ran in self.ran:
            if ran.tokens and not ran.decoded:
                tokens, steps = tokens + ran.tokens, steps + 1
            elif steps:
                yield ran.decoded, tokens, steps
                tokens = steps = 0
