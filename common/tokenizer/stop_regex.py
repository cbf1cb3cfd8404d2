"""Stop expressions (``stop_regex``), matched on a text that arrives in deltas.

Python's ``re`` cannot resume where it stopped, and it backtracks: some expressions take time exponential in the text.
Here an expression becomes an automaton whose states all step together (Thompson, 1968). A character costs at most
MAX_STEPS small operations, whatever the expression, and the position from which the text may still become a match is
known.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

try:  # pragma: no cover - Python 3.11 and later
    import re._constants as sre  # type: ignore[import-not-found]
    import re._parser as sre_parse  # type: ignore[import-not-found]
except ImportError:  # pragma: no cover - Python 3.10
    import sre_constants as sre
    import sre_parse

from ..api.errors import InvalidRequest

MAX_CHARS = 1024
MAX_STATES = 512
MAX_STEPS = 1024
"""Steps from state to state that one character may take: 0.1 ms of them."""

_START, _NEWLINE, _OTHER = range(3)  # the kind of character before a position in the text
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal, sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_WORD: lambda char: char.isalnum() or char == "_"}
_OPPOSITES = {sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT, sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
              sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD}


class _State:
    """A state of the automaton: steps over a character that ``fits``. Without ``fits`` it is an epsilon transition to
    all states of ``after``, where the previous character's kind is in ``follows``. ``nexts``: the states after a line's
    end, and after any other character."""

    __slots__ = ("fits", "after", "follows", "nexts")

    def __init__(self, fits: Callable[[str], bool] | None = None, after: Sequence[_State] = (),
                 follows: tuple[int, ...] = (_START, _NEWLINE, _OTHER)):
        self.fits = fits
        self.after = list(after)
        self.follows = follows
        self.nexts: tuple[list[_State], list[_State]] = ([], [])

    def reached(self, before: int) -> list[_State]:
        """The epsilon closure of this state: the states that step over a character, and the accepting one."""
        closure: list[_State] = []
        seen, todo = {self}, [self]
        while todo:
            state = todo.pop()
            if state.fits is not None or not state.after:
                closure.append(state)
            elif before in state.follows:
                fresh = [after for after in state.after if after not in seen]
                seen.update(fresh)
                todo += fresh
        return closure


class _Builder:
    """Builds states from an expression's end to its beginning: each part gets the state that follows it."""

    def __init__(self) -> None:
        self.accept = _State()
        self.consuming: list[_State] = []
        self._count = 0

    def sequence(self, items: Any, then: _State, flags: int) -> _State:
        for op, value in reversed(list(items)):
            then = self._part(op, value, then, flags)
        return then

    def _part(self, op: Any, value: Any, then: _State, flags: int) -> _State:
        if op is sre.SUBPATTERN:
            _, added, removed, items = value
            return self.sequence(items, then, (flags | added) & ~removed)
        if op is sre.BRANCH:
            return self._state(None, [self.sequence(items, then, flags) for items in value[1]])
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(value, then, flags)
        if op is sre.AT:
            return self._place(value, then, flags)
        return self._state(_fits(op, value, flags), [then])

    def _repeat(self, value: Any, then: _State, flags: int) -> _State:
        least, most, items = value
        if most is sre.MAXREPEAT:
            loop = self._state(None, [then])
            loop.after.append(self.sequence(items, loop, flags))
            first = loop
        else:
            first = then
            for _ in range(most - least):
                first = self._state(None, [self.sequence(items, first, flags), then])
        for _ in range(least):
            self._count_one()
            first = self.sequence(items, first, flags)
        return first

    def _place(self, where: Any, then: _State, flags: int) -> _State:
        if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            lines = where is sre.AT_BEGINNING and flags & re.MULTILINE
            return self._state(None, [then], (_START, _NEWLINE) if lines else (_START,))
        if where in (sre.AT_END, sre.AT_END_STRING) and then.reached(_START) == [self.accept]:
            return then  # the text so far ends at every position where it is matched
        raise _Unusable("holds \\b, or $ before its end")

    def _state(self, fits: Callable[[str], bool] | None, after: Sequence[_State],
               follows: tuple[int, ...] = (_START, _NEWLINE, _OTHER)) -> _State:
        self._count_one()
        state = _State(fits, after, follows)
        if fits is not None:
            self.consuming.append(state)
        return state

    def _count_one(self) -> None:
        self._count += 1
        if self._count > MAX_STATES:
            raise _Unusable("is too large: its repeats, written out, have too many parts")


class _Unusable(Exception):
    """An expression cannot be used; the message follows "stop_regex PATTERN"."""


class StopExpression:
    """A compiled expression, shared by all requests that have it. ``starts``: the states in which a match begins, by
    the kind of character before it."""

    def __init__(self, pattern: str):
        """Raises InvalidRequest for what is no regular expression, or can match nothing, or needs backtracking."""
        self.pattern = pattern
        try:
            self._build(pattern)
        except _Unusable as why:
            reason = str(why)
        except re.error as error:
            reason = f"is no regular expression: {error}"
        except (RecursionError, OverflowError):
            reason = "is nested too deeply"
        else:
            return
        shown = pattern if len(pattern) <= 100 else f"{pattern[:100]}..."
        raise InvalidRequest(f"stop_regex {shown!r} {reason}.", param="stop_regex")

    def _build(self, pattern: str) -> None:
        if len(pattern) > MAX_CHARS:
            raise _Unusable(f"has {len(pattern)} characters; at most {MAX_CHARS} are supported")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what later versions of Python may read otherwise
            parsed = sre_parse.parse(pattern)
        builder = _Builder()
        first = builder.sequence(parsed, builder.accept, parsed.state.flags)
        self.accept = builder.accept
        self.starts = [first.reached(before) for before in (_START, _NEWLINE, _OTHER)]
        if any(self.accept in states for states in self.starts):
            raise _Unusable("matches the empty text, so that every answer would end at once")
        for state in builder.consuming:
            state.nexts = (state.after[0].reached(_NEWLINE), state.after[0].reached(_OTHER))
        if max(map(len, self.starts)) + sum(max(map(len, state.nexts)) for state in builder.consuming) > MAX_STEPS:
            raise _Unusable("is too large: too many of its parts may match at once")


@lru_cache(maxsize=256)
def stop_expression(pattern: str) -> StopExpression:
    """Raises InvalidRequest."""
    return StopExpression(pattern)


class RegexMatcher:
    """Matches one text. ``state``: the number of characters at its end that may still become a match."""

    __slots__ = ("word", "state", "_expression", "_active", "_before", "_at")

    def __init__(self, pattern: str):
        """Raises InvalidRequest."""
        self.word = pattern
        self.state = 0
        self._expression = stop_expression(pattern)
        self._active: dict[_State, int] = {}  # by state, the earliest beginning of its match
        self._before = _START
        self._at = 0

    def step(self, char: str) -> int:
        """Take one character; the length of the match that it completes, the longest one, else 0."""
        active, expression = self._active, self._expression
        for state in expression.starts[self._before]:
            active.setdefault(state, self._at)
        self._at += 1
        self._before = _NEWLINE if char == "\n" else _OTHER
        kind = 0 if char == "\n" else 1
        active_next: dict[_State, int] = {}
        for state, start in active.items():
            if state.fits is not None and state.fits(char):
                for after in state.nexts[kind]:
                    if active_next.get(after, self._at) > start:
                        active_next[after] = start
        start = active_next.pop(expression.accept, self._at)
        self._active = active_next
        self.state = self._at - min(active_next.values(), default=self._at)
        return self._at - start


# ---------------------------------------------------------------- characters


def _fits(op: Any, value: Any, flags: int) -> Callable[[str], bool]:
    """A test for the characters that one element of an expression matches."""
    if op is sre.ANY:
        return _anything if flags & re.DOTALL else _no_newline
    if op is sre.LITERAL:
        items = [(sre.LITERAL, value)]
    elif op is sre.NOT_LITERAL:
        items = [(sre.NEGATE, None), (sre.LITERAL, value)]
    elif op is sre.IN:
        items = list(value)
    else:
        raise _Unusable("looks around, refers back or is atomic, which needs backtracking")
    negated = items[0][0] is sre.NEGATE
    tests = [_test(kind, what, flags) for kind, what in items if kind is not sre.NEGATE]
    if len(tests) == 1:
        only = tests[0]
        return (lambda char: not only(char)) if negated else only
    return lambda char: any(test(char) for test in tests) is not negated


def _test(kind: Any, value: Any, flags: int) -> Callable[[str], bool]:
    if kind is sre.CATEGORY:
        opposite = _OPPOSITES.get(value)
        plain = _CATEGORIES[value if opposite is None else opposite]
        test = (lambda char: char.isascii() and plain(char)) if flags & re.ASCII else plain
        return test if opposite is None else lambda char: not test(char)
    low, high = (value, value) if kind is sre.LITERAL else value
    if low == high and not flags & re.IGNORECASE:
        return chr(low).__eq__
    if not flags & re.IGNORECASE:
        return lambda char: low <= ord(char) <= high
    return lambda char: any(len(one) == 1 and low <= ord(one) <= high for one in (char, char.lower(), char.upper()))


def _anything(char: str) -> bool:
    return True


def _no_newline(char: str) -> bool:
    return char != "\n"
