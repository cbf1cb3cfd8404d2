"""Compiled grammars of an engine, on the rank that chooses tokens."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..api.errors import InvalidRequest, ServingError
from ..api.grammar import GrammarSpec, Vocabulary
from ..api.messages import Done, PrepareGrammar

if TYPE_CHECKING:
    import xgrammar

    from ..request.req import Req
    from .compiler import Compiler
    from .masks import FillRow, MaskFiller
    from .matcher import Matcher

log = logging.getLogger("baton.grammar")


class GrammarStore:
    """Compiles beside the step loop; the front says which grammars are kept. xgrammar is imported with the first."""

    def __init__(self, whitespace: str | None, vocab_size: int, eos_ids: frozenset[int]):
        self._whitespace = whitespace
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._vocabulary: Vocabulary | None = None
        self._compiler: Compiler | None = None
        self._filler: MaskFiller | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiling")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="grammar-loading")  # behind no compilation
        self._making = threading.Lock()
        self._compiled: dict[GrammarSpec, xgrammar.CompiledGrammar] = {}
        self._pending: dict[int, Future[Done]] = {}

    @property
    def busy(self) -> bool:
        """Whether ``finished`` has more to give, soon."""
        return bool(self._pending)

    def prepare(self, message: PrepareGrammar) -> None:
        """Begin to compile, or to load; ``finished`` tells when it is done."""
        self._vocabulary = message.vocabulary or self._vocabulary
        thread = self._compiling if message.compiled is None else self._loading
        self._pending[message.seq] = thread.submit(self._prepare, message)

    def finished(self) -> list[Done]:
        """Answers to the front, each once."""
        done = [seq for seq, future in self._pending.items() if future.done()]
        return [self._pending.pop(seq).result() for seq in done]

    def drop(self, spec: GrammarSpec) -> None:
        """Requests that use it keep it."""
        self._compiled.pop(spec, None)

    def matcher(self, req: Req, start: int) -> Matcher:
        """For a request whose output begins at token ``start``; it fails with its first token where the grammar, which
        the front has not had prepared, cannot be used."""
        from .matcher import Matcher

        spec = req.sampling.grammar
        assert spec is not None
        compiled, error = self._compiled.get(spec), None
        if compiled is None:
            try:
                compiled = self._compile(spec)
            except InvalidRequest as refusal:
                error = refusal
        return Matcher(compiled, req.tokens, start, req.stop_ids, self._eos_ids, req.sampling, error)

    def fill(self, matchers: list[Matcher]) -> list[FillRow]:
        """See MaskFiller.fill."""
        if self._filler is None:
            from .masks import MaskFiller

            self._filler = MaskFiller(self._vocab_size)
        return self._filler.fill(matchers)

    def close(self) -> None:
        for thread in (self._compiling, self._loading):
            thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, message: PrepareGrammar) -> Done:
        try:
            made = self._compile(message.spec) if message.compiled is None else self._made().load(
                message.spec, message.compiled)
            self._compiled[message.spec] = made
        except ServingError as error:
            return Done(message.seq, error.message, error.code)
        except Exception:  # the front waits for an answer
            log.exception("a grammar failed to compile")
            return Done(message.seq, "The engine failed to compile the grammar; its log says why.", ServingError.code)
        return Done(message.seq, "The grammar is ready.")

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        return self._made().compile(spec)

    def _made(self) -> Compiler:
        with self._making:
            if self._compiler is None:
                if self._vocabulary is None:
                    raise InvalidRequest("The engine has not been told its vocabulary; send the request to its API "
                                         "server.")
                from .compiler import Compiler

                self._compiler = Compiler(self._vocabulary, self._whitespace)
            return self._compiler
