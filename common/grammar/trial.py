"""A process that compiles grammars to see whether they can be: it may hang, grow or die, and nobody else does."""

from __future__ import annotations

import os
import resource
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from ..api.errors import InvalidRequest, WorkerUnavailable
from ..api.grammar import GrammarSpec, Vocabulary

START_SECONDS = 120.0  # importing torch takes some on a busy machine
COMPILE_SECONDS = 10.0
MEMORY_BYTES = 4 << 30  # beyond what the process has when it starts
MAX_COMPILED_BYTES = 256 << 20


class _Verdict(msgspec.Struct):
    """Memory that the compiled grammar takes, or why there is none."""

    num_bytes: int = 0
    refusal: str | None = None


_spec_decoder = msgspec.msgpack.Decoder(GrammarSpec)
_verdict_decoder = msgspec.msgpack.Decoder(_Verdict)


class Trial:
    """Starts its process with the first grammar. Its methods block: call them from one thread, ``close`` from any."""

    def __init__(self, vocabulary: Vocabulary, whitespace: str | None, *, compile_seconds: float = COMPILE_SECONDS,
                 memory_bytes: int = MEMORY_BYTES):
        self.vocabulary = vocabulary
        self._whitespace = whitespace
        self._compile_seconds = compile_seconds
        self._memory_bytes = memory_bytes
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._closed = False

    def check(self, spec: GrammarSpec) -> int:
        """Bytes that the compiled grammar takes. Raises InvalidRequest where it cannot be compiled within the limits,
        and WorkerUnavailable where the process does not start."""
        pipe = self._started()
        pipe.send_bytes(msgspec.msgpack.encode(spec))
        if not pipe.poll(self._compile_seconds):
            self._kill()
            raise InvalidRequest(f"The {spec.kind} takes longer than {self._compile_seconds:g} s to compile; "
                                 "simplify it.")
        verdict = self._receive()
        if verdict is None:
            raise InvalidRequest(f"The {spec.kind} is too large or too deeply nested to compile; simplify it.")
        if verdict.refusal is not None:
            raise InvalidRequest(verdict.refusal)
        if verdict.num_bytes > MAX_COMPILED_BYTES:
            raise InvalidRequest(f"The {spec.kind} takes {verdict.num_bytes >> 20} MiB when compiled, of "
                                 f"{MAX_COMPILED_BYTES >> 20} at most; simplify it.")
        return verdict.num_bytes

    def close(self) -> None:
        """A check that runs fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _started(self) -> Connection:
        if self._pipe is None:
            context = get_context("spawn")
            ours, theirs = context.Pipe()
            self._process = context.Process(
                target=_main, name="grammar-trial", daemon=True,
                args=(theirs, self.vocabulary, self._whitespace, self._memory_bytes, os.getpid()))
            self._process.start()
            self._pipe = ours
            theirs.close()
            if self._closed or not ours.poll(START_SECONDS) or self._receive() is None:
                self._kill()
                raise WorkerUnavailable("The grammar compiler does not start; the server's log says why.")
        return self._pipe

    def _receive(self) -> _Verdict | None:
        """What the process says; None where it has died."""
        assert self._pipe is not None
        try:
            return _verdict_decoder.decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._kill()
            return None

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _main(pipe: Connection, vocabulary: Vocabulary, whitespace: str | None, memory_bytes: int, parent: int) -> None:
    from ..engine.ranks import die_with

    die_with(parent)
    os.nice(5)  # the engine's processes come first
    from .compiler import Compiler

    compiler = Compiler(vocabulary, whitespace, max_threads=max(1, min(4, (os.cpu_count() or 1) // 2)))
    _limit_memory(memory_bytes)
    pipe.send_bytes(msgspec.msgpack.encode(_Verdict()))
    while True:
        try:
            spec = _spec_decoder.decode(pipe.recv_bytes())
        except EOFError:
            return
        try:
            compiled = compiler.compile(spec)
            compiler.check_beginning(compiled)
            verdict = _Verdict(compiled.memory_size_bytes)
        except InvalidRequest as error:
            verdict = _Verdict(refusal=error.message)
        pipe.send_bytes(msgspec.msgpack.encode(verdict))


def _limit_memory(more: int) -> None:
    """Let this process map ``more`` bytes beyond what it has."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
