"""The front's side of grammars: each is tried once, made ready in the engine once, and kept while it is in use."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ..api.errors import InvalidRequest, Overloaded
from ..api.grammar import GrammarSpec, Vocabulary
from ..config.server import GrammarArgs
from ..tokenizer.tokenizer import Tokenizer
from .trial import Trial

MAX_SOURCE = 256 * 1024  # characters
MAX_WAITING = 64
CACHE_BYTES = 512 << 20
CACHE_COUNT = 1024


class GrammarEngine(Protocol):
    """What the service asks of the engine's client."""

    async def prepare_grammar(self, spec: GrammarSpec, vocabulary: Vocabulary | None) -> None:
        """Returns when the engine takes requests with this grammar; ``vocabulary`` comes with the first."""

    def drop_grammar(self, spec: GrammarSpec) -> None: ...


@dataclass(frozen=True)
class _Outcome:
    """A grammar that is ready, or the reason why it never will be; ``num_bytes`` are kept for it."""

    num_bytes: int = 0
    refusal: str | None = None


class GrammarService:
    """``prepare`` a request's grammars before it is sent. Must be used from one event loop."""

    def __init__(self, args: GrammarArgs, engine: GrammarEngine, vocab_size: int, stop_ids: Sequence[int]):
        self._args = args
        self._engine = engine
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._trial: Trial | None = None
        self._told_vocabulary = False
        self._first = asyncio.Lock()
        self._outcomes: OrderedDict[GrammarSpec, asyncio.Task[_Outcome]] = OrderedDict()

    async def prepare(self, spec: GrammarSpec, tokenizer: Tokenizer, param: str | None) -> None:
        """Returns when a request with this grammar may be sent to the engine. Raises InvalidRequest, which names
        ``param``, for a grammar that cannot be used, and Overloaded while too many others are being compiled."""
        if self._args.grammar_backend == "none":
            raise InvalidRequest("This server was started without grammars (--grammar-backend none).", param=param,
                                 code="unsupported_parameter")
        if not self._stop_ids:
            raise InvalidRequest("The model names no end-of-sequence token, so that an answer by a grammar could not "
                                 "end.", param=param, code="unsupported_parameter")
        if len(spec.text) > MAX_SOURCE:
            raise InvalidRequest(f"The {spec.kind} has {len(spec.text)} characters; at most {MAX_SOURCE} are taken.",
                                 param=param)
        outcome = await self._outcome(spec, tokenizer)
        if outcome.refusal is not None:
            raise InvalidRequest(outcome.refusal, param=param, code="invalid_grammar")

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _outcome(self, spec: GrammarSpec, tokenizer: Tokenizer) -> _Outcome:
        task = self._outcomes.get(spec)
        if task is None:
            if sum(not task.done() for task in self._outcomes.values()) >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} grammars wait to be compiled; try again later.", retry_after=1.0)
            task = self._outcomes[spec] = asyncio.create_task(self._try(spec, tokenizer), name="grammar")
        self._outcomes.move_to_end(spec)
        return await asyncio.shield(task)  # others may wait for it, too

    async def _try(self, spec: GrammarSpec, tokenizer: Tokenizer) -> _Outcome:
        """What is neither made nor refused is tried again by whoever asks next."""
        try:
            return await self._make(spec, tokenizer)
        except BaseException:
            del self._outcomes[spec]
            raise

    async def _make(self, spec: GrammarSpec, tokenizer: Tokenizer) -> _Outcome:
        loop = asyncio.get_running_loop()
        async with self._first:
            if self._trial is None:
                vocabulary = await loop.run_in_executor(self._thread, self._vocabulary, tokenizer)
                self._trial = Trial(vocabulary, self._args.whitespace)
        trial = self._trial
        try:
            outcome = _Outcome(await loop.run_in_executor(self._thread, trial.check, spec))
        except InvalidRequest as error:
            outcome = _Outcome(len(spec.text), error.message)
        else:
            told, self._told_vocabulary = self._told_vocabulary, True
            await self._engine.prepare_grammar(spec, None if told else trial.vocabulary)
        self._make_room(outcome.num_bytes)
        return outcome

    def _vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        return Vocabulary([tokenizer.piece(token) for token in range(self._vocab_size)],
                          sorted(id for id in tokenizer.special_ids if id < self._vocab_size), self._stop_ids)

    def _make_room(self, num_bytes: int) -> None:
        """Forget the grammars that were not asked for longest, until one more fits. Requests that use them go on."""
        done = [(spec, task.result()) for spec, task in self._outcomes.items() if task.done()]
        total, count = num_bytes + sum(outcome.num_bytes for _, outcome in done), len(self._outcomes)
        for spec, outcome in done:
            if total <= CACHE_BYTES and count <= CACHE_COUNT:
                break
            del self._outcomes[spec]
            total, count = total - outcome.num_bytes, count - 1
            if outcome.refusal is None:
                self._engine.drop_grammar(spec)


