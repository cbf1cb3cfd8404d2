"""Executes a state's expressions in order, in a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .backends.base import Answer, Backend, Message, Prompt
from .errors import ProgramError
from .expressions import (
    CachePrefix,
    Expression,
    Gen,
    JoinText,
    Media,
    Part,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
)
from .sampling import SamplingParams


@dataclass(frozen=True)
class Run:
    """The data that all states of one run share."""

    backend: Backend
    defaults: SamplingParams
    stream: bool = False


@dataclass(frozen=True)
class Piece:
    """Text that a stream gained, the newest ``meta_info`` of its variable, and True at its end."""

    text: str
    meta_info: Any
    last: bool


class Interpreter:
    """A state's text, turns and variables, and the thread that appends to them.

    ``submit`` returns at once; readers wait for what they read. The thread starts with the first expression and ends
    after ``end`` or at the first error, which readers then raise. All methods may be called from any thread.
    """

    def __init__(self, run: Run, source: Interpreter | None = None):
        self.run = run
        self.program: threading.Thread | None = None  # of a stream: others wait for the program's end, too
        self._changed = threading.Condition()
        self._parts: deque[Part] = deque()
        self._pending: Counter[str] = Counter()  # by variable: expressions submitted that set it
        self._partial: dict[str, str] = {}  # texts of streams that are being generated
        self._thread: threading.Thread | None = None
        self._busy = self._ended = False
        self._error: Exception | None = None
        self._children: list[Interpreter] = []
        self._scopes: dict[str, int] = {}
        self._text: str = source._text if source else ""
        self._messages: list[Message] = list(source._messages) if source else []
        self._role: str | None = source._role if source else None
        self._turn_start: int = source._turn_start if source else 0
        self._variables: dict[str, Any] = dict(source._variables) if source else {}
        self._meta: dict[str, Any] = dict(source._meta) if source else {}
        self._forked_at = len(self._text)

    # ------------------------------------------------------------------ the program's side

    def submit(self, what: Expression) -> None:
        """Appends an expression; raises RuntimeError after the program's end."""
        with self._changed:
            if self._ended:
                raise RuntimeError("The program has ended: append to its state within the function.")
            if self._error is not None:
                return
            self._parts.extend(what.parts)
            self._pending.update(what.names())
            for name in what.names():
                self._partial.pop(name, None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="baton-lang", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def fork(self, size: int) -> list[Interpreter]:
        """States that go on from this one's text and variables, each by itself."""
        if size > 1 and self._text_so_far():
            self.submit(Expression((CachePrefix(),)))
        self.wait()
        children = [Interpreter(self.run, self) for _ in range(size)]
        self._children += children
        return children

    def end(self, error: Exception | None = None) -> None:
        """Takes no further expressions; those submitted are still executed. ``error`` is the program's own."""
        for child in self._children:
            child.end()
        with self._changed:
            self._ended = True
            if error is not None:
                self._stop(error)
            self._changed.notify_all()

    # ------------------------------------------------------------------ readers

    def wait(self) -> None:
        """Returns when all that was submitted is executed; raises the error that ended it."""
        with self._changed:
            self._changed.wait_for(self._done)
            self._raise()

    def error(self) -> Exception | None:
        with self._changed:
            self._changed.wait_for(self._done)
            return self._error

    def text(self) -> str:
        self.wait()
        return self._text

    def messages(self) -> list[Message]:
        self.wait()
        return list(self._messages)

    def forked_text(self) -> str:
        """The text that was appended since the fork."""
        return self.text()[self._forked_at:]

    def variables(self) -> dict[str, Any]:
        self.wait()
        return dict(self._variables)

    def has(self, name: str) -> bool:
        """True for a variable that is set or being generated."""
        with self._changed:
            return name in self._variables or self._pending[name] > 0

    def get(self, name: str) -> Any:
        """A variable's value; raises KeyError where nothing sets it."""
        self._wait_for(name, None)
        return self._variables[name]

    def meta_info(self, name: str, timeout: float | None = None) -> Any:
        """``meta_info`` of the generation that set a variable, None for others; raises TimeoutError."""
        self._wait_for(name, timeout)
        return self._meta.get(name)

    def put(self, name: str, value: Any) -> None:
        with self._changed:
            self._variables[name] = value
            self._changed.notify_all()

    def next_piece(self, name: str | None, position: int) -> Piece:
        """Waits for text beyond ``position`` of a variable (None: of the whole state), or for its end."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._grown(name)) > position or self._complete(name))
            last = self._complete(name)
            if last:
                self._raise()
            return Piece(self._grown(name)[position:], self._meta.get(name or ""), last)

    def _grown(self, name: str | None) -> str:
        if name is None:
            return self._text
        text = self._partial.get(name, "" if self._pending[name] else self._variables.get(name, ""))
        return str(text[0] if isinstance(text, list) else text)

    def _complete(self, name: str | None) -> bool:
        over = self._idle() and (self._ended or self._error is not None)
        return over or (name is not None and name in self._variables and not self._pending[name])

    def _wait_for(self, name: str, timeout: float | None) -> None:
        def settled() -> bool:
            return name in self._variables and not self._pending[name] or self._error is not None or self._done()

        with self._changed:
            if not self._changed.wait_for(settled, timeout):
                raise TimeoutError(f"Variable {name} was not ready after {timeout} s.")
            if name not in self._variables:
                self._raise()

    def _idle(self) -> bool:
        return self._error is not None or not (self._parts or self._busy)

    def _done(self) -> bool:
        inside = self.program in (None, threading.current_thread())
        return self._idle() and (inside or self._ended or self._error is not None)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _text_so_far(self) -> bool:
        with self._changed:
            return bool(self._text or self._parts)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while (part := self._next()) is not None:
            try:
                self._execute(part)
            except Exception as error:  # whatever a backend raises ends this state, and its readers get it
                with self._changed:
                    self._stop(error)
                return

    def _next(self) -> Part | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._parts or self._ended)
            self._busy = bool(self._parts)
            return self._parts.popleft() if self._parts else None

    def _stop(self, error: Exception) -> None:
        self._error = self._error or error
        for name in +self._pending:  # an older value is not what readers wait for
            self._variables.pop(name, None)
        self._parts.clear()
        self._pending.clear()
        self._busy = False
        self._changed.notify_all()

    def _append(self, text: str) -> None:
        with self._changed:
            self._text += text
            self._changed.notify_all()

    def _set(self, name: str | None, value: Any, meta_info: Any = None) -> None:
        if name is None:
            return
        with self._changed:
            self._variables[name] = value
            self._meta[name] = meta_info
            self._partial.pop(name, None)
            self._pending[name] -= 1
            self._changed.notify_all()

    def _execute(self, part: Part) -> None:
        if isinstance(part, Text):
            self._append(part.value)
        elif isinstance(part, Gen):
            self._generate(part)
        elif isinstance(part, Select):
            decision = self.run.backend.select(self._prompt(), part.choices, part.method)
            self._append(decision.choice)
            self._set(part.name, decision.choice, decision.meta_info)
        elif isinstance(part, RoleBegin):
            self._begin(part.role)
        elif isinstance(part, RoleEnd):
            self._close(part.role)
        elif isinstance(part, ScopeBegin):
            self._scopes[part.name] = len(self._text)
        elif isinstance(part, ScopeEnd):
            self._set(part.name, self._text[self._scopes.pop(part.name):])
        elif isinstance(part, CachePrefix):
            self.run.backend.cache_prefix(self._text)
        elif isinstance(part, JoinText):
            self._append("".join(branch.forked_text() for branch in part.branches))
        else:
            assert isinstance(part, Media)
            raise ProgramError(f"{part.kind} is not supported here: no served model takes images or videos; "
                               "describe it in words.")

    def _prompt(self) -> Prompt:
        turn = self._text[self._turn_start:] if self._role else ""
        return Prompt(self._text, tuple(self._messages), self._role, turn)

    def _generate(self, part: Gen) -> None:
        params = part.params.over(self.run.defaults)
        if (self._messages or self._role) and not params.ignore_eos:
            params = params.with_stops(self.run.backend.chat_template().stop)
        answer = self._stream(part, params) if self.run.stream else self._whole(params)
        self._set(part.name, answer.text, answer.meta_info)

    def _whole(self, params: SamplingParams) -> Answer:
        answer = self.run.backend.generate(self._prompt(), params)
        self._append(answer.text if isinstance(answer.text, str) else answer.text[0])
        return answer

    def _stream(self, part: Gen, params: SamplingParams) -> Answer:
        if (params.n or 1) > 1:
            raise ProgramError("n does not combine with stream=True: run the program without stream.")
        text, meta_info = "", None
        for piece in self.run.backend.stream(self._prompt(), params):
            meta_info = piece.meta_info
            with self._changed:
                text += str(piece.text)
                self._text += str(piece.text)
                if part.name is not None:
                    self._partial[part.name] = text
                    self._meta[part.name] = meta_info
                self._changed.notify_all()
        return Answer(text, meta_info)

    def _begin(self, role: str) -> None:
        if self._role is not None:
            raise ProgramError(f"A turn of {role} begins within one of {self._role}: close that first.")
        before = self._messages[-1]["role"] if self._messages else None
        self._append(self.run.backend.chat_template().begin(role, before))
        self._role, self._turn_start = role, len(self._text)

    def _close(self, role: str) -> None:
        if self._role != role:
            raise ProgramError(f"A turn of {role} ends where {self._role or 'none'} is open: begin it first.")
        self._messages.append({"role": role, "content": self._text[self._turn_start:].lstrip()})
        self._role = None
        self._append(self.run.backend.chat_template().end(role))


def join_variables(source: Interpreter, branches: Sequence[Interpreter]) -> None:
    """Gives the source a list of each variable that forks set anew, an item per fork."""
    known = set(source.variables())
    gathered: dict[str, list[Any]] = {}
    for branch in branches:
        for name, value in branch.variables().items():
            if name not in known:
                gathered.setdefault(name, []).append(value)
    for name, values in gathered.items():
        source.put(name, values)
