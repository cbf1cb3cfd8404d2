"""The state of a running program: the ``s`` that its function gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .api import role
from .errors import ProgramError
from .expressions import Expression, JoinText, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, expression
from .interpreter import Interpreter, join_variables

_NOTHING = Expression(())


class ProgramState:
    """Grows by ``s += ...``; ``s["name"]`` waits for a variable. What went wrong while it grew is raised by readers."""

    def __init__(self, interpreter: Interpreter):
        self._interpreter = interpreter
        self.ret_value: Any = None

    def __iadd__(self, other: object) -> ProgramState:
        self._interpreter.submit(expression(other))
        return self

    def __getitem__(self, name: str) -> Any:
        return self._interpreter.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._interpreter.put(name, value)

    def __contains__(self, name: str) -> bool:
        return self._interpreter.has(name)

    def __repr__(self) -> str:
        return f"ProgramState({self.text()!r})"

    def get_var(self, name: str) -> Any:
        """As ``s[name]``; raises KeyError where nothing sets the variable."""
        return self._interpreter.get(name)

    def set_var(self, name: str, value: Any) -> None:
        self._interpreter.put(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """``meta_info`` of the answer that set a variable; raises TimeoutError after ``timeout`` seconds."""
        return self._interpreter.meta_info(name, timeout)

    # ------------------------------------------------------------------ turns

    def system(self, content: object = None) -> Any:
        """Appends a turn of the system, or opens one for a ``with`` block."""
        return self._turn("system", content)

    def user(self, content: object = None) -> Any:
        """Appends a turn of the user, or opens one for a ``with`` block."""
        return self._turn("user", content)

    def assistant(self, content: object = None) -> Any:
        """Appends a turn of the model, or opens one for a ``with`` block."""
        return self._turn("assistant", content)

    def _turn(self, name: str, content: object) -> Any:
        if content is None:
            return self._between(RoleBegin(name), RoleEnd(name))
        self._interpreter.submit(role(name, content))
        return _NOTHING  # so that `s += s.system("...")` appends it once

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """The text that a ``with`` block appends becomes a variable."""
        return self._between(ScopeBegin(name), ScopeEnd(name))

    @contextmanager
    def _between(self, begin: RoleBegin | ScopeBegin, end: RoleEnd | ScopeEnd) -> Iterator[None]:
        self._interpreter.submit(Expression((begin,)))
        yield
        self._interpreter.submit(Expression((end,)))

    # ------------------------------------------------------------------ forks

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        """States that go on from here in parallel; the text so far is computed once. Raises ProgramError."""
        if position_ids_offset is not None:
            raise ProgramError("fork has no position_ids_offset here: leave it out.")
        return ProgramStateGroup([ProgramState(each) for each in self._interpreter.fork(size)], self)

    @contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> Iterator[ProgramState]:
        """A fork for a ``with`` block, whose new variables come back as lists of one."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    # ------------------------------------------------------------------ results

    def sync(self) -> None:
        """Returns when all that was appended is generated; raises what ended it."""
        self._interpreter.wait()

    def error(self) -> Exception | None:
        """The error that ended the state's growth early, if any did."""
        return self._interpreter.error()

    def text(self) -> str:
        """The whole text, prompts and answers."""
        return self._interpreter.text()

    def messages(self) -> list[dict[str, Any]]:
        """The closed turns, as OpenAI's messages."""
        return self._interpreter.messages()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of the whole text, or of one variable, as they come; of a run without ``stream`` all at once."""
        for piece, _ in self._pieces(var_name):
            yield piece

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As ``text_iter``; with ``return_meta_data`` pairs of a piece and its ``meta_info``."""
        pieces = self._pieces(var_name)
        while (item := await asyncio.to_thread(next, pieces, None)) is not None:
            yield item if return_meta_data else item[0]

    def _pieces(self, name: str | None) -> Iterator[tuple[str, Any]]:
        if not self._interpreter.run.stream:
            yield (self.text() if name is None else self[name]), self.get_meta_info(name or "")
            return
        position, last = 0, False
        while not last:
            piece = self._interpreter.next_piece(name, position)
            position, last = position + len(piece.text), piece.last
            if piece.text:
                yield piece.text, piece.meta_info


class ProgramStateGroup:
    """The states of a fork. ``group += [...]`` appends an item to each, ``group += function`` what it says of each."""

    def __init__(self, states: Sequence[ProgramState], source: ProgramState):
        self.states = list(states)
        self._source = source

    def join(self, mode: str = "gather_variable") -> None:
        """Waits for the forks and ends them.

        ``gather_variable`` gives the source a list of each new variable; ``concate_and_append`` appends the forks'
        texts to its text. Raises ProgramError for another mode.
        """
        source, branches = self._source._interpreter, [state._interpreter for state in self.states]
        if mode == "gather_variable":
            join_variables(source, branches)
        elif mode == "concate_and_append":
            source.submit(Expression((JoinText(branches),)))
            source.wait()
        else:
            raise ProgramError(f"join has no mode {mode}: use gather_variable or concate_and_append.")
        for branch in branches:
            branch.end()

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """Only the state that is there already: Python assigns it back after ``group[i] += ...``."""
        if state is not self.states[index]:
            raise ProgramError("The states of a fork cannot be replaced: append to them.")

    def __iadd__(self, other: object) -> ProgramStateGroup:
        for index, state in enumerate(self.states):
            state += _share(other, index)
        return self


def _share(value: Any, index: int) -> object:
    if isinstance(value, (list, tuple)):
        return value[index]
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return value(index)
    return value
