"""The API server's part of grammars: each is test-compiled once, prepared in the engine once, and cached."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ..api.errors import InvalidRequest, Overloaded
from ..api.grammar import GrammarSpec, Vocabulary
from ..config.server import GrammarArgs
from ..tokenizer.tokenizer import Tokenizer
from .fair_slots import FairSlots
from .trial import Budget, Compiled, OverBudget, Trial

MAX_SOURCE_CHARACTERS = 256 * 1024
MAX_WAITING = 128
MAX_WAITING_PER_CLIENT = 32
MAX_SLOW_PER_CLIENT = 8
_QUICK_BUDGET = Budget(0.3, cpu_time=True, threads=1)
_QUICK_SLOTS = 2  # five slow grammars ahead then cost a client 0.8 s
_SLOW_BUDGET = Budget(10.0)
_SLOW_SLOTS = 1
CACHE_BYTES = 512 << 20
CACHE_COUNT = 1024


class GrammarEngine(Protocol):
    """The part of the engine client that the service uses."""

    async def prepare_grammar(self, spec: GrammarSpec, vocabulary: Vocabulary | None, compiled: str | None) -> None:
        """Returns when the engine accepts requests with this grammar; the first call passes the ``vocabulary``."""

    def drop_grammar(self, spec: GrammarSpec) -> None: ...


@dataclass(frozen=True)
class _Outcome:
    """A grammar that is ready, or the reason why it is refused; ``num_bytes`` count towards the cache."""

    num_bytes: int = 0
    refusal: str | None = None


class GrammarService:
    """Prepares the grammar of a request before it is sent. Must be used from one event loop.

    Each grammar gets a short budget first. One that needs more joins the queue of slow ones, which are compiled one at
    a time: usual grammars do not wait for slow ones. Clients share both fairly.
    """

    def __init__(self, args: GrammarArgs, engine: GrammarEngine, vocab_size: int, stop_ids: Sequence[int]):
        self._args = args
        self._engine = engine
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self._threads = ThreadPoolExecutor(_QUICK_SLOTS + _SLOW_SLOTS, thread_name_prefix="grammar")
        self._quick, self._slow = FairSlots(_QUICK_SLOTS), FairSlots(_SLOW_SLOTS)
        self._num_waiting: Counter[str] = Counter()  # by client
        self._trial: Trial | None = None
        self._sent_vocabulary = False
        self._trial_lock = asyncio.Lock()
        self._outcomes: OrderedDict[GrammarSpec, asyncio.Task[_Outcome]] = OrderedDict()

    async def prepare(self, spec: GrammarSpec, tokenizer: Tokenizer, param: str | None, client: str = "") -> None:
        """Returns when a request with this grammar may be sent to the engine. Raises InvalidRequest, which names
        ``param``, for a grammar that cannot be used, and Overloaded while too many others, or too many of ``client``,
        wait to be compiled."""
        if self._args.grammar_backend == "none":
            raise InvalidRequest("This server was started without grammars (--grammar-backend none).", param=param,
                                 code="unsupported_parameter")
        if not self._stop_ids:
            raise InvalidRequest("The model names no end-of-sequence token, so that an answer by a grammar could not "
                                 "end.", param=param, code="unsupported_parameter")
        if len(spec.text) > MAX_SOURCE_CHARACTERS:
            raise InvalidRequest(f"The {spec.kind} has {len(spec.text)} characters; at most {MAX_SOURCE_CHARACTERS} "
                                 "are taken.", param=param)
        outcome = await self._get_outcome(spec, tokenizer, client)
        if outcome.refusal is not None:
            raise InvalidRequest(outcome.refusal, param=param, code="invalid_grammar")

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _get_outcome(self, spec: GrammarSpec, tokenizer: Tokenizer, client: str) -> _Outcome:
        task = self._outcomes.get(spec)
        if task is None:
            if self._num_waiting.total() >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} grammars wait to be compiled; try again later.", retry_after=1.0)
            if self._num_waiting[client] >= MAX_WAITING_PER_CLIENT:
                raise Overloaded(f"{MAX_WAITING_PER_CLIENT} grammars of this client wait to be compiled; try again "
                                 "when some are.", retry_after=1.0)
            self._num_waiting[client] += 1
            task = self._outcomes[spec] = asyncio.create_task(self._try_prepare(spec, tokenizer, client),
                                                              name="grammar")
            task.add_done_callback(_retrieve_exception)
        self._outcomes.move_to_end(spec)
        return await asyncio.shield(task)  # others may wait for it, too

    async def _try_prepare(self, spec: GrammarSpec, tokenizer: Tokenizer, client: str) -> _Outcome:
        """Prepares a grammar; after an error that is no refusal the next request tries again."""
        try:
            return await self._prepare(spec, tokenizer, client)
        except BaseException:
            del self._outcomes[spec]
            raise
        finally:
            self._num_waiting[client] -= 1
            if not self._num_waiting[client]:
                del self._num_waiting[client]

    async def _prepare(self, spec: GrammarSpec, tokenizer: Tokenizer, client: str) -> _Outcome:
        async with self._trial_lock:
            if self._trial is None:
                vocabulary = await asyncio.get_running_loop().run_in_executor(self._threads, self._vocabulary,
                                                                              tokenizer)
                self._trial = Trial(vocabulary, self._args.whitespace, backend=self._args.grammar_backend)
        trial = self._trial
        try:
            compiled = await self._compile(trial, spec, client)
        except InvalidRequest as error:
            outcome = _Outcome(len(spec.text), error.message)
        else:
            outcome = _Outcome(compiled.num_bytes)
            has_vocabulary, self._sent_vocabulary = self._sent_vocabulary, True
            await self._engine.prepare_grammar(spec, None if has_vocabulary else trial.vocabulary, compiled.text)
        self._evict(outcome.num_bytes)
        return outcome

    async def _compile(self, trial: Trial, spec: GrammarSpec, client: str) -> Compiled:
        """Raises InvalidRequest where it cannot be compiled, Overloaded where it is slow and too many such wait."""
        loop = asyncio.get_running_loop()
        try:
            async with self._quick.slot(client):
                return await loop.run_in_executor(self._threads, trial.compile, spec, _QUICK_BUDGET)
        except OverBudget:
            if self._slow.num_waiting(client) >= MAX_SLOW_PER_CLIENT:
                raise Overloaded(f"{MAX_SLOW_PER_CLIENT} grammars of this client that take long wait to be compiled; "
                                 "try again when some are, or simplify this one.", retry_after=10.0) from None
        try:
            async with self._slow.slot(client):
                return await loop.run_in_executor(self._threads, trial.compile, spec, _SLOW_BUDGET)
        except OverBudget:
            raise InvalidRequest(f"The {spec.kind} takes longer than {_SLOW_BUDGET.seconds:g} s to compile; simplify "
                                 "it.") from None

    def _vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        return Vocabulary([tokenizer.token_bytes(token) for token in range(self._vocab_size)],
                          sorted(id for id in tokenizer.special_ids if id < self._vocab_size), self._stop_ids)

    def _evict(self, num_bytes: int) -> None:
        """Evicts the least recently used grammars until another one fits. Requests that use them are not affected."""
        done = [(spec, task.result()) for spec, task in self._outcomes.items() if task.done()]
        total, count = num_bytes + sum(outcome.num_bytes for _, outcome in done), len(self._outcomes)
        for spec, outcome in done:
            if total <= CACHE_BYTES and count <= CACHE_COUNT:
                break
            del self._outcomes[spec]
            total, count = total - outcome.num_bytes, count - 1
            if outcome.refusal is None:
                self._engine.drop_grammar(spec)


def _retrieve_exception(task: asyncio.Task[_Outcome]) -> None:
    """Retrieves an exception that no request waits for any more, otherwise asyncio logs its traceback."""
    if not task.cancelled():
        task.exception()
