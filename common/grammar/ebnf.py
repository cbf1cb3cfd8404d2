"""Reads grammars in EBNF as xgrammar and llama.cpp (GBNF) write it: ``root ::= "a" [0-9]+ (b | c)? {1,3}``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..api.errors import InvalidRequest

MAX_DEPTH = 200
_LAST_CHARACTER = 0x10FFFF
_TOKEN = re.compile(
    r'(?P<space>[ \t\r\n]+|#[^\n]*)|(?P<define>::=)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<chars>\[(?:[^\]\\\n]|\\.)*\])'
    r"|(?P<repeat>\{\s*\d+\s*(?:,\s*(?:-1|\d+)?\s*)?\})|(?P<name>[A-Za-z_.-][\w.-]*)|(?P<sign>[()|*+?])|(?P<other>.)",
    re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))"
                     r"|([^\\])", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "b": "\b", "e": "\x1b"}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Chars:
    """One character of these ranges, first and last included."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Ref:
    rule: str


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Expr, ...]


@dataclass(frozen=True)
class Repeat:
    """``most`` is None without a limit."""

    part: Expr
    least: int
    most: int | None


Expr = Text | Chars | Ref | Sequence | Choice | Repeat


def parse(source: str) -> dict[str, Expr]:
    """Returns the expressions of a grammar's rules, among them ``root``; raises InvalidRequest for a mistake."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise mistake('The rule with name "root" is not found')
    for name, rule in rules.items():
        for used in references(rule):
            if used not in rules:
                raise mistake(f'Rule "{used}" is not defined, and "{name}" uses it')
    return rules


def references(expr: Expr) -> Iterator[str]:
    """Yields the names of the rules that an expression uses."""
    match expr:
        case Ref(rule):
            yield rule
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from references(part)
        case Repeat(part):
            yield from references(part)


def recursive_rules(rules: dict[str, Expr]) -> frozenset[str]:
    """Returns the names of rules that lead to themselves, or to one that does."""
    used = {name: {*references(rule)} for name, rule in rules.items()}
    left = {*rules}
    while ended := {name for name in left if not used[name] & left}:
        left -= ended
    return frozenset(left)


def mistake(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The ebnf cannot be used as a grammar: {reason}.")


class _Parser:
    def __init__(self, source: str):
        self._source = source
        self._tokens = [token for token in _TOKEN.finditer(source) if token.lastgroup != "space"]
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, Expr]:
        rules: dict[str, Expr] = {}
        while self._next < len(self._tokens):
            if not self._begins_rule():
                raise self._unexpected('a rule, as in name ::= "text"')
            name = self._tokens[self._next][0]
            if name in rules:
                raise mistake(f'Rule "{name}" is defined twice')
            self._next += 2
            rules[name] = self._choice()
        return rules

    def _begins_rule(self) -> bool:
        return self._kind() == "name" and self._kind(1) == "define"

    def _choice(self) -> Expr:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise mistake(f"Nest layer of parentheses is more than {MAX_DEPTH}")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Expr:
        parts: list[Expr] = []
        while self._kind() in ("text", "chars", "name") and not self._begins_rule() or self._peek() == "(":
            parts.append(self._repeated(self._primary()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _primary(self) -> Expr:
        if self._take("("):
            inner = self._choice()
            if not self._take(")"):
                raise self._unexpected("a closing parenthesis")
            return inner
        kind, found = self._kind(), self._tokens[self._next][0]
        self._next += 1
        if kind == "text":
            return Text("".join(map(chr, self._characters(found[1:-1]))))
        if kind == "chars":
            return self._chars(found[1:-1])
        if self._peek() == "(" and found in ("Token", "TagDispatch", "TokenTagDispatch", "Regex", "ExcludeToken"):
            raise mistake(f"{found}(...) is xgrammar's alone, which another grammar backend does not take")
        return Ref(found)

    def _repeated(self, part: Expr) -> Expr:
        while True:
            if self._take("*"):
                part = Repeat(part, 0, None)
            elif self._take("+"):
                part = Repeat(part, 1, None)
            elif self._take("?"):
                part = Repeat(part, 0, 1)
            elif self._kind() == "repeat":
                least, comma, most = self._tokens[self._next][0][1:-1].replace(" ", "").partition(",")
                self._next += 1
                limit = int(least) if not comma else None if most in ("", "-1") else int(most)
                if limit is not None and limit < int(least):
                    raise mistake(f"a repetition of at least {least} and at most {limit} is impossible")
                part = Repeat(part, int(least), limit)
            else:
                return part

    def _chars(self, text: str) -> Chars:
        negated = text.startswith("^")
        codes = self._codes(text[1:] if negated else text)
        ranges: list[tuple[int, int]] = []
        index = 0
        while index < len(codes):
            first = codes[index][1]
            if index + 2 < len(codes) and codes[index + 1] == (False, ord("-")):
                last = codes[index + 2][1]
                if last < first:
                    raise mistake(f"the range {chr(first)}-{chr(last)} is in the wrong order")
                ranges.append((first, last))
                index += 3
            else:
                ranges.append((first, first))
                index += 1
        return Chars(_without(ranges) if negated else tuple(sorted(ranges)))

    def _characters(self, text: str) -> list[int]:
        return [code for _, code in self._codes(text)]

    def _codes(self, text: str) -> list[tuple[bool, int]]:
        """Returns the characters of a text, and which were written with an escape."""
        codes = []
        for found in _ESCAPE.finditer(text):
            escaped, plain = found[5], found[6]
            if plain is not None:
                codes.append((False, ord(plain)))
            elif escaped is not None:
                codes.append((True, ord(_LETTERS.get(escaped, escaped))))
            else:
                code = int(found[1] or found[2] or found[3] or found[4], 16)
                if code > _LAST_CHARACTER or 0xD800 <= code < 0xE000:
                    raise mistake(f"{found[0]} is no character")
                codes.append((True, code))
        return codes

    def _take(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._next += 1
        return True

    def _peek(self) -> str | None:
        return self._tokens[self._next][0] if self._kind() == "sign" else None

    def _kind(self, ahead: int = 0) -> str | None:
        index = self._next + ahead
        return self._tokens[index].lastgroup if index < len(self._tokens) else None

    def _unexpected(self, wanted: str) -> InvalidRequest:
        if self._next >= len(self._tokens):
            return mistake(f"it ends where {wanted} should follow")
        token = self._tokens[self._next]
        line = self._source.count("\n", 0, token.start()) + 1
        return mistake(f"line {line} has {token[0][:40]!r} where {wanted} should follow")


def _without(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of all characters that are in none of ``ranges``."""
    found, begin = [], 0
    for first, last in sorted([*ranges, (0xD800, 0xDFFF)]):
        if first > begin:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= _LAST_CHARACTER:
        found.append((begin, _LAST_CHARACTER))
    return tuple(found)
