"""Refuses patterns of JSON schemas whose strings need escapes in JSON.

xgrammar (0.2.8) matches a pattern against the string as it is written in the JSON text. Classes of characters exclude
those that need an escape there, but a quotation mark, a backslash or a control character that the pattern names is
written unescaped: the answer is not JSON then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ..api.errors import InvalidRequest

_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b"}
_TOKEN = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\u\{(?P<braced>[0-9a-fA-F]{1,6})\}|\\c(?P<control>[A-Za-z])"
    r"|\\[pP]\{[^}]*\}|\\(?P<escaped>.)|(?P<plain>.)", re.DOTALL)
_DATA = frozenset(("const", "enum", "default", "examples", "description", "title"))


def check_patterns(kind: str, text: str) -> None:
    """Raises InvalidRequest for a pattern, in a JSON schema or in those of a structural tag, that names a character
    which JSON escapes."""
    if '"pattern' not in text:
        return
    parsed = json.loads(text)
    for schema in [parsed] if kind == "json_schema" else _schemas_of(parsed):
        for pattern in _patterns(schema):
            if (found := escaped_character(pattern)) is not None:
                raise InvalidRequest(
                    f"The pattern {pattern[:80]!r} names the character {found!r}, which JSON writes with an escape: a "
                    "grammar cannot follow that; change the pattern, or leave it out.")


def escaped_character(pattern: str) -> str | None:
    """Returns a character that the pattern names and JSON escapes; None without one.

    A class of characters counts only where it has no others: otherwise a string can use those that need no escape.
    """
    tokens = [_character(token) for token in _TOKEN.finditer(pattern)]
    index = 0
    while index < len(tokens):
        if tokens[index] == ("plain", "["):
            index, members = _class_at(tokens, index + 1)
            if members and all(member is not None and _needs_escape(member) for member in members):
                return members[0]
        elif (char := tokens[index][1]) is not None and _needs_escape(char):
            return char
        index += 1
    return None


def _class_at(tokens: list[tuple[str, str | None]], index: int) -> tuple[int, list[str | None]]:
    """Returns the index of the bracket that closes a class, and its members, none of a negated one."""
    negated = tokens[index:index + 1] == [("plain", "^")]
    members: list[str | None] = []
    while index < len(tokens) and (tokens[index] != ("plain", "]")):
        if tokens[index] != ("plain", "-") or not members:
            members.append(tokens[index][1])
        index += 1
    return index, [] if negated else members


def _character(token: re.Match[str]) -> tuple[str, str | None]:
    """Returns whether the token is plain or escaped, and its character; None for an escape of several, as a class."""
    for name in ("x", "u", "braced"):
        if token[name] is not None:
            code = int(token[name], 16)
            return "escaped", chr(code) if code < 0x110000 else None
    if token["control"] is not None:
        return "escaped", chr(ord(token["control"].upper()) - 64)
    if token["plain"] is not None:
        return "plain", token["plain"]
    escaped = token["escaped"]
    if escaped is None:
        return "escaped", None
    return "escaped", _CONTROLS.get(escaped) if escaped.isalnum() else escaped


def _needs_escape(char: str) -> bool:
    return char in '"\\' or char < " "


def _schemas_of(tag: Any) -> Iterator[Any]:
    """Yields the JSON schemas in a structural tag; XML formats escape nothing."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.get("type") == "json_schema":
                yield part.get("json_schema")
            waiting += [value for key, value in part.items() if key != "json_schema"]
        elif isinstance(part, list):
            waiting += part


def _patterns(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                yield part["pattern"]
            if isinstance(names := part.get("patternProperties"), dict):
                yield from names
            waiting += [value for key, value in part.items() if key not in _DATA]
