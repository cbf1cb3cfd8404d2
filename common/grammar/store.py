"""The compiled grammars of an engine, on the rank that samples tokens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, cast

from ..api.errors import InvalidRequest, ServingError
from ..api.grammar import GrammarSpec, Vocabulary
from ..api.messages import Done, PrepareGrammar
from ..config.server.answers import GRAMMAR_BACKENDS
from .masks import FillRow, MaskFiller
from .matcher import Matcher

if TYPE_CHECKING:
    from ..request.output_matcher import OutputMatcher
    from ..request.req import Req
    from .backend import CompiledGrammar, GrammarCompiler

log = logging.getLogger("baton.grammar")


class GrammarStore:
    """Compiles in threads in parallel to the step loop; the API server decides which grammars are cached. Imports
    the backend's library with the first."""

    def __init__(self, whitespace: str | None, vocab_size: int, eos_ids: frozenset[int], backend: str = "xgrammar"):
        self._backend = backend
        self._whitespace = whitespace
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None
        self._filler: MaskFiller | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiling")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="grammar-loading")  # does not wait for compilations
        self._compiler_lock = threading.Lock()
        self._compiled: dict[GrammarSpec, CompiledGrammar] = {}
        self._pending: dict[int, Future[Done]] = {}

    @property
    def busy(self) -> bool:
        """True if ``finished`` will return more."""
        return bool(self._pending)

    def prepare(self, message: PrepareGrammar) -> None:
        """Starts to compile, or to load; ``finished`` returns the answer."""
        self._vocabulary = message.vocabulary or self._vocabulary
        thread = self._compiling if message.compiled is None else self._loading
        self._pending[message.seq] = thread.submit(self._prepare, message)

    def finished(self) -> list[Done]:
        """Returns answers for the API server, each once."""
        done = [seq for seq, future in self._pending.items() if future.done()]
        return [self._pending.pop(seq).result() for seq in done]

    def drop(self, spec: GrammarSpec) -> None:
        """Removes a grammar from the cache; requests that use it are not affected."""
        self._compiled.pop(spec, None)

    def matcher(self, req: Req, start: int) -> Matcher:
        """Creates the matcher of a request whose output begins at token ``start``. Where the grammar was not prepared
        and cannot be compiled, the request fails with its first token."""
        spec = req.sampling.grammar
        assert spec is not None
        compiled, error = self._compiled.get(spec), None
        if compiled is None:
            try:
                compiled = self._compile(spec)
            except InvalidRequest as refusal:
                error = refusal
        begin = None if compiled is None else partial(GRAMMAR_BACKENDS.get(self._backend).state, compiled)
        return Matcher(begin, req.tokens, start, req.stop_ids, self._eos_ids, req.sampling, error)

    def fill(self, matchers: Sequence[OutputMatcher]) -> list[FillRow | None]:
        """Fills the masks of a step for matchers of this store, see ``MaskFiller.fill``."""
        if self._filler is None:
            self._filler = MaskFiller(self._vocab_size, GRAMMAR_BACKENDS.get(self._backend).fill_together)
        return self._filler.fill(cast("Sequence[Matcher]", matchers))

    def close(self) -> None:
        for thread in (self._compiling, self._loading):
            thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, message: PrepareGrammar) -> Done:
        try:
            if message.compiled is None:
                self._compiled[message.spec] = self._compile(message.spec)
            else:
                self._compiled[message.spec] = self._get_compiler().load(message.spec, message.compiled)
        except ServingError as error:
            return Done(message.seq, error.message, error.code)
        except Exception:  # the API server waits for an answer
            log.exception("a grammar failed to compile")
            return Done(message.seq, "The engine failed to compile the grammar; its log says why.", ServingError.code)
        return Done(message.seq, "The grammar is ready.")

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        compiled: CompiledGrammar = self._get_compiler().compile(spec)
        return compiled

    def _get_compiler(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                if self._vocabulary is None:
                    raise InvalidRequest("The engine has not been told its vocabulary; send the request to its API "
                                         "server.")
                self._compiler = GRAMMAR_BACKENDS.get(self._backend).compiler(self._vocabulary, self._whitespace)
            return self._compiler
