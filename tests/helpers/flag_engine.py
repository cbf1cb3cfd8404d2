"""Engines of servers' command lines in this process, stepped by hand, alone or as a prefill and decode pair; they
record what each step gave each request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.common.api.grammar import GrammarSpec
from baton.common.api.messages import Bootstrap, Failed, FromEngine, Generate, PrepareGrammar
from baton.common.api.sampling import SamplingParams
from baton.common.config.cli import parse
from baton.common.config.server import ServerConfig
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup
from baton.common.engine.rank import EngineParts, build_parts, device_of, unified_scheduler
from baton.common.engine.rank_spec import RankSpec
from baton.common.request.req import Req
from baton.common.request.step_input import StepInput
from baton.common.request.step_output import StepOutput
from baton.common.scheduler.chain_planner import num_verified
from baton.decode.rank import _make_scheduler as decode_scheduler
from baton.kernels.tuning.policy import set_batch_invariant
from baton.kvtransfer.bootstrap import BootstrapServer
from baton.prefill.rank import _make_scheduler as prefill_scheduler
from baton.tests.helpers.grammar_engine import vocabulary
from baton.tests.helpers.outputs import SentOutput, outputs_of
from baton.tests.helpers.ports import free_port

SCHEDULERS: dict[str, Callable[[EngineParts], Any]] = {
    "null": unified_scheduler, "prefill": prefill_scheduler, "decode": decode_scheduler}


@dataclass(frozen=True)
class Question:
    """A prompt and what is asked of it. ``answered``: output that another server has sent already."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0, max_new_tokens=48))
    answered: Sequence[int] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """A step that sampled for a request: it verified ``drafts`` drafts, none where it computed the last chunk of a
    prompt (``prefill``)."""

    prefill: bool
    drafts: int


@dataclass
class Answer:
    """A request's tokens, how many came at once and by which steps, and its logprobs. ``begun``: output tokens that
    another server had sent before."""

    begun: int = 0
    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    steps: list[Ran] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finish: str = ""

    @property
    def verified(self) -> list[tuple[int, int, int]]:
        """Each step but those of prompts: output tokens before it, drafts that it verified, tokens that it gave."""
        assert len(self.lengths) == len(self.steps), (self.lengths, self.steps)
        found, known = [], self.begun
        for step, length in zip(self.steps, self.lengths):
            if not step.prefill:
                found.append((known, step.drafts, length))
            known += length
        return found


class FlagEngine:
    """The engine of a server's command line, stepped by hand. ``take`` returns what each request got."""

    def __init__(self, *flags: str, parallel: Parallel | None = None):
        argv = ["--model-path", "tinychat", "--device", "cpu", *flags]
        self.config = parse(ServerConfig, argv, prog="engine", description="")
        if self.config.kernels.enable_deterministic_inference:
            set_batch_invariant(True)  # for the process, as a rank's start does; the caller unsets it
        self.sent: list[FromEngine] = []
        spec = RankSpec(self.config, 0, 1, "", "", "")
        self.parts = build_parts(spec, parallel or Parallel(TPGroup(device=device_of(spec))), self.sent.append,
                                 lambda what, share: None)
        self.scheduler = SCHEDULERS[self.config.mode](self.parts)
        self.tracker, self.cache = self.parts.tracker, self.parts.batcher.cache
        self.num_launched = 0
        self._begun: dict[str, int] = {}
        self._steps: dict[str, list[Ran]] = {}
        self._grammars: set[GrammarSpec] = set()
        launch = self.parts.executor.launch

        def recorded(step: StepInput, *rest: Any) -> Any:
            self.num_launched += 1
            for index in step.sample_index if step.chains is None else ():
                ran = Ran(index < step.num_prefill, len(step.drafts[index].tokens) if index in step.drafts else 0)
                self._steps.setdefault(step.reqs[index].rid, []).append(ran)
            return launch(step, *rest)

        self.parts.executor.launch = recorded  # type: ignore[method-assign,assignment]
        if self.parts.batcher.chains is not None:
            self._record_chains()

    def _record_chains(self) -> None:
        """Records chain steps when their results are processed: the number of drafts is not known before."""
        drafting = self.parts.batcher.drafting
        assert drafting is not None
        count = drafting.count

        def counted(step: StepInput, output: StepOutput, counts: np.ndarray) -> None:
            if step.chains is not None:
                assert step.input_batch is not None
                for req, drafts in zip(step.reqs, num_verified(step.chains, step.input_batch).tolist()):
                    self._steps.setdefault(req.rid, []).append(Ran(False, drafts))
            count(step, output, counts)

        drafting.count = counted  # type: ignore[method-assign]

    def start(self, rid: str, question: Question, bootstrap: Bootstrap | None = None) -> Req:
        """Adds a request; on a decode server with ``bootstrap`` its first step is prefill's."""
        grammar = question.sampling.grammar
        message = Generate(rid, [*question.prompt, *question.answered], question.sampling, bootstrap=bootstrap,
                           num_answered=len(question.answered), **question.fields)
        req = self.tracker.accept(message, now=0.0)
        assert req is not None, self.sent
        if grammar is not None:
            self._prepare(grammar)
            assert self.parts.grammars is not None
            req.matcher = self.parts.grammars.matcher(req, req.num_prompt_tokens - len(question.answered))
        if bootstrap is not None and self.config.mode == "decode":
            self._steps[rid] = [Ran(True, 0)]
        self._begun[rid] = len(question.answered)
        self.scheduler.add(req)
        return req

    def _prepare(self, grammar: GrammarSpec) -> None:
        if grammar not in self._grammars:
            assert self.parts.grammars is not None
            self.parts.grammars.prepare(PrepareGrammar(0, grammar, None if self._grammars else vocabulary()))
            self._grammars.add(grammar)

    def step(self) -> bool:
        worked: bool = self.scheduler.step(0.0)
        self.tracker.flush()
        return worked

    def take(self) -> dict[str, Answer]:
        """What was sent since the last call; no request may have failed."""
        failed = [message for message in self.sent if isinstance(message, Failed)]
        assert not failed, failed
        answers: dict[str, Answer] = {}
        for output in outputs_of(self.sent):
            if output.rid not in answers:
                answers[output.rid] = Answer(self._begun.pop(output.rid), steps=self._steps.pop(output.rid, []))
            _add(answers[output.rid], output)
        if self.parts.overlap:
            for answer in answers.values():
                del answer.steps[len(answer.lengths):]  # launched before its end was known
        self.sent.clear()
        return answers

    def assert_clean(self) -> None:
        """No request is left and no page allocated."""
        assert self.scheduler.idle and not self.tracker.live
        self.cache.check_integrity()
        assert self.cache.num_allocated == 0

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """Asks all questions at once."""
        for number, question in enumerate(questions):
            self.start(str(number), question)
        return self.finish(len(questions))

    def finish(self, count: int, *, idle: bool = False) -> list[Answer]:
        """Runs until the engine is idle, if it is not; returns the answers of requests 0 to ``count`` - 1."""
        if not idle:
            run(self)
        found = self.take()
        self.assert_clean()
        return [found[str(number)] for number in range(count)]


def _add(answer: Answer, output: SentOutput) -> None:
    if not answer.lengths:
        answer.cached_tokens = output.num_cached_tokens
    if output.token_ids:
        answer.tokens += output.token_ids
        answer.lengths.append(len(output.token_ids))
    if output.logprobs is not None:
        answer.logprobs += output.logprobs.values
    if output.finish is not None:
        answer.finish = output.finish.reason


def run(*engines: FlagEngine, until: Callable[[], bool] | None = None, seconds: float = 300.0) -> None:
    """Steps engines in turn until all are idle, or ``until`` returns True."""
    deadline = time.monotonic() + seconds
    done = until or (lambda: all(engine.scheduler.idle for engine in engines))
    while not done():
        assert time.monotonic() < deadline, "the engines make no progress"
        worked = [engine.step() for engine in engines]
        if not any(worked):
            time.sleep(0.001)


@contextmanager
def bootstrap_server() -> Iterator[int]:
    """Runs a bootstrap server in a thread; yields its port."""
    port, loop, started, stop = free_port(), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with BootstrapServer("127.0.0.1", port):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


class FlagPair:
    """A prefill engine and a decode engine, or several decode engines one after the other, over a transfer backend in
    this process."""

    def __init__(self, port: int, flags: Sequence[str], prefill_flags: Sequence[str] = (),
                 decode_flags: Sequence[str] = ()):
        self._meeting = ["--disaggregation-bootstrap-port", str(port), "--disaggregation-transfer-backend", "fake"]
        self._decode_flags = [*flags, *decode_flags]
        self._port, self._rooms = port, iter(range(1, 1 << 30))
        self.prefill = FlagEngine("--disaggregation-mode", "prefill", *self._meeting, *flags, *prefill_flags)
        self.decode = self.new_decode()

    def new_decode(self) -> FlagEngine:
        """Makes a decode engine, which requests go to from now on."""
        self.decode = FlagEngine("--disaggregation-mode", "decode", *self._meeting, *self._decode_flags)
        return self.decode

    def connect(self) -> None:
        """Opens the way from prefill, as a router has it done before the first request."""
        receiver, prefill = self.decode.scheduler.receiver, ("127.0.0.1", self._port)
        receiver.connect(prefill)
        run(self.prefill, until=lambda: receiver.connected(prefill) is not None)

    def start(self, rid: str, question: Question, previous: int | None = None) -> tuple[Req, int]:
        """Starts both halves of a request; returns prefill's, and the room."""
        room = next(self._rooms)
        bootstrap = Bootstrap("127.0.0.1", self._port, room, previous)
        half = self.prefill.start(rid, question, bootstrap)
        self.decode.start(rid, question, bootstrap)
        return half, room

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """Asks all questions at once; the first tokens are the same at both halves."""
        for number, question in enumerate(questions):
            self.start(str(number), question)
        return self.finish(len(questions))

    def finish(self, count: int) -> list[Answer]:
        """Runs both engines until they are idle; returns the answers of requests 0 to ``count`` - 1."""
        run(self.prefill, self.decode)
        self.prefill.take()
        found = self.decode.take()
        self.prefill.assert_clean()
        self.decode.assert_clean()
        return [found[str(number)] for number in range(count)]

    def close(self) -> None:
        self.prefill.scheduler.close()
        self.decode.scheduler.close()
