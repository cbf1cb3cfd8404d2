"""Test-compiles grammars in a process that forks a child for each: the child may hang, grow or die without harm.

The process imports xgrammar and prepares the vocabulary once, which takes seconds; a child is forked in milliseconds
and has both. It gets its grammar over a socket that its parent passes on, and ends with its answer, or by a timer.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import threading
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import msgspec

from ..api.errors import InvalidRequest, WorkerUnavailable
from ..api.grammar import GrammarSpec, Vocabulary
from ..config.server.answers import GRAMMAR_BACKENDS
from ..process import die_with

if TYPE_CHECKING:
    from .backend import GrammarCompiler

START_SECONDS = 120.0  # importing torch takes some on a busy machine
MEMORY_BYTES = 4 << 30  # beyond what the process has when it starts
MAX_COMPILED_BYTES = 256 << 20
_MAX_SERIALIZED_CHARACTERS = 64 << 20  # of a compiled grammar; beyond, the engine compiles it again


class Budget(msgspec.Struct, frozen=True):
    """The budget of one compilation: wall-clock seconds, or with ``cpu_time`` processor seconds; and threads, None for
    the default."""

    seconds: float
    cpu_time: bool = False
    threads: int | None = None


class Compiled(msgspec.Struct, frozen=True):
    """A grammar that compiles: the memory that it takes, and its serialization by xgrammar."""

    num_bytes: int
    text: str | None


class OverBudget(Exception):
    """The grammar takes longer than its budget."""


class _Job(msgspec.Struct):
    spec: GrammarSpec
    budget: Budget


class _Verdict(msgspec.Struct):
    """The result of a child: one field is set, none where the child died of its grammar."""

    compiled: Compiled | None = None
    refusal: str | None = None
    over_budget: bool = False


_job_decoder = msgspec.msgpack.Decoder(_Job)
_verdict_decoder = msgspec.msgpack.Decoder(_Verdict)


class Trial:
    """Starts its process with the first grammar. Its methods block, and may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary, whitespace: str | None, *, backend: str = "xgrammar",
                 memory_bytes: int = MEMORY_BYTES):
        self._backend = backend
        self.vocabulary = vocabulary
        self._whitespace = whitespace
        self._memory_bytes = memory_bytes
        self._starting = threading.Lock()
        self._process: BaseProcess | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def compile(self, spec: GrammarSpec, budget: Budget) -> Compiled:
        """Raises InvalidRequest where the grammar cannot be compiled, OverBudget, and WorkerUnavailable where the
        process does not start."""
        verdict = self._verdict(_Job(spec, budget))
        if verdict.over_budget:
            raise OverBudget
        if verdict.compiled is None:
            raise InvalidRequest(verdict.refusal or f"The {spec.kind} is too large or too deeply nested to compile; "
                                                    "simplify it.")
        if verdict.compiled.num_bytes > MAX_COMPILED_BYTES:
            raise InvalidRequest(f"The {spec.kind} takes {verdict.compiled.num_bytes >> 20} MiB when compiled, of "
                                 f"{MAX_COMPILED_BYTES >> 20} at most; simplify it.")
        return verdict.compiled

    def close(self) -> None:
        """Ends the process; running compilations fail."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _verdict(self, job: _Job) -> _Verdict:
        for _ in range(2):  # the process may have been killed since the last grammar
            process, control = self._ensure_started()
            ours, theirs = socket.socketpair()
            pipe = Connection(ours.detach())
            try:
                with theirs:
                    socket.send_fds(control, [b"j"], [theirs.fileno()])
                pipe.send_bytes(msgspec.msgpack.encode(job))
                if not pipe.poll(job.budget.seconds + START_SECONDS):
                    process.kill()
                return _verdict_decoder.decode(pipe.recv_bytes())
            except (EOFError, OSError):
                process.kill()
                process.join()
            finally:
                pipe.close()
        raise WorkerUnavailable("The grammar compiler was ended; the server's log says why.")

    def _ensure_started(self) -> tuple[BaseProcess, socket.socket]:
        with self._starting:
            if self._process is not None and self._control is not None and self._process.is_alive():
                return self._process, self._control
            if self._control is not None:
                self._control.close()
            context = get_context("spawn")
            ours, theirs = socket.socketpair()
            self._process = context.Process(
                target=_main, name="grammar-compiler", daemon=True,
                args=(theirs, self._backend, self.vocabulary, self._whitespace, self._memory_bytes, os.getpid()))
            self._process.start()
            self._control = ours
            theirs.close()
            ours.settimeout(START_SECONDS)
            try:
                started = not self._closed and ours.recv(1) == b"r"
            except OSError:
                started = False
            if not started:
                self._process.kill()
                raise WorkerUnavailable("The grammar compiler does not start; the server's log says why.")
            ours.settimeout(None)
            return self._process, ours


def _main(control: socket.socket, backend: str, vocabulary: Vocabulary, whitespace: str | None, memory_bytes: int,
          parent: int) -> None:
    die_with(parent)
    os.nice(5)  # the engine's processes come first
    compiler = GRAMMAR_BACKENDS.get(backend).compiler(vocabulary, whitespace)
    compiler.learn_vocabulary()
    control.send(b"r")
    _Children(compiler, control, memory_bytes).serve()


class _Children:
    """The loop of the process: forks a child for each grammar from ``control``, and reports how the child ended where
    it could not itself."""

    def __init__(self, compiler: GrammarCompiler, control: socket.socket, memory_bytes: int):
        self._compiler = compiler
        self._control = control
        self._memory_bytes = memory_bytes
        self._pipes: dict[int, Connection] = {}  # by the children's process ids
        self._ended, self._wake = socket.socketpair()
        self._ended.setblocking(False)
        self._wake.setblocking(False)

    def serve(self) -> None:
        """Returns when the other end of ``control`` is closed."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno())
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._ended in ready:
                    self._ended.recv(4096)
                    self._reap()
                if self._control in ready:
                    received, handles, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not received:
                        return
                    self._fork(Connection(handles[0]))

    def _fork(self, pipe: Connection) -> None:
        own = os.getpid()
        child = os.fork()
        if child:
            self._pipes[child] = pipe
            return
        signal.set_wakeup_fd(-1)
        die_with(own)
        self._control.close()
        try:
            _compile(self._compiler, pipe, self._memory_bytes)
        finally:
            os._exit(0)

    def _reap(self) -> None:
        """Reports children that a timer has ended, which could not do so themselves."""
        while self._pipes:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            with self._pipes.pop(child) as pipe, contextlib.suppress(OSError):
                if os.WIFSIGNALED(status):
                    over = os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
                    pipe.send_bytes(msgspec.msgpack.encode(_Verdict(over_budget=over)))


def _compile(compiler: GrammarCompiler, pipe: Connection, memory_bytes: int) -> None:
    """Compiles in a child; the kernel ends it where its budget is spent."""
    job = _job_decoder.decode(pipe.recv_bytes())
    _limit_memory(memory_bytes)
    budget = job.budget
    if not budget.cpu_time:
        os.nice(10)  # quick grammars come first
    signal.setitimer(signal.ITIMER_PROF if budget.cpu_time else signal.ITIMER_REAL, budget.seconds)
    try:
        compiled = compiler.compile(job.spec, budget.threads)
        compiler.check_beginning(compiled)
        text = compiled.serialize_json()
        verdict = _Verdict(Compiled(compiled.memory_size_bytes,
                                    text if len(text) <= _MAX_SERIALIZED_CHARACTERS else None))
    except InvalidRequest as error:
        verdict = _Verdict(refusal=error.message)
    pipe.send_bytes(msgspec.msgpack.encode(verdict))


def _limit_memory(more: int) -> None:
    """Limits this process to ``more`` bytes of mappings beyond its current ones."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
