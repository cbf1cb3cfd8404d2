"""Writes grammars in llguidance's dialect of Lark, from regular expressions, EBNF and JSON schemas.

llguidance reads text by lexemes, and takes the longest: ``/[a-z]*/ "b"`` as two lexemes does not match "ab". So what is
regular becomes one lexeme, however many parts it has (a ``Piece`` that is ``regular``, and whose neighbours are joined
to it), and a recursive EBNF grammar gets a lexeme for each character.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from ..api.errors import InvalidRequest
from ..parsers.schema_rules import check_enforceable
from . import ebnf

ANY_TEXT = "/(?s:.*)/"
_CLOSED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_SUBSCHEMAS = frozenset(("items", "prefixItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
                         "anyOf", "oneOf"))


@dataclass(frozen=True)
class Piece:
    """An expression of Lark; a ``regular`` one may be a part of a terminal. ``parts`` are those of a sequence, of which
    the outer ones may yet be joined to neighbours."""

    expr: str
    regular: bool
    parts: tuple[Piece, ...] = ()


class Lark:
    """A grammar that is being written. ``whitespace`` is a regular expression for that of JSON, None any."""

    def __init__(self, whitespace: str | None):
        self._whitespace = whitespace
        self._lines: list[str] = []

    def text(self, start: Piece) -> str:
        """Returns the whole grammar; every token that fits is allowed, also where the text is determined."""
        return "\n".join(['%llguidance {"no_forcing": true}', f"start: {self.rule(start)}", *self._lines])

    def terminal(self, expr: str) -> str:
        """Adds a terminal, returns its name."""
        return self._add("T", expr)

    def rule(self, piece: Piece, attributes: str = "") -> str:
        """Adds a rule, returns its name."""
        return self._add("r", self.terminal(piece.expr) if piece.regular else piece.expr, attributes)

    def any_text(self, ends: Sequence[str], excludes: Sequence[str] = ()) -> Piece:
        """Text without ``excludes``, up to the first of ``ends``, which belongs to it, where there are any."""
        text = self._without([*ends, *excludes]) if ends or excludes else ANY_TEXT
        if not ends:
            return Piece(text, True)
        return Piece(self._add("r", f"{text} ({' | '.join(map(literal, ends))})", "[lazy]"), False)

    def text_of(self, source: Mapping[str, Any], end: str) -> Piece:
        """Text by the keywords of a JSON schema for strings, without ``end``."""
        if values := source.get("enum", [source["const"]] if "const" in source else []):
            return self.either([Piece(literal(str(value)), True) for value in values])
        exprs = [self._without([end])]
        if "pattern" in source:
            exprs.append(self.regex(_unanchored(str(source["pattern"]))).expr)
        if "minLength" in source or "maxLength" in source:
            exprs.append(f"/(?s:.{{{source.get('minLength', 0)},{source.get('maxLength', '')}}})/")
        return Piece(self.terminal(" & ".join(exprs)), True)

    def _without(self, texts: Sequence[str]) -> str:
        """Returns a terminal for any text that contains none of ``texts``; bytes that are no UTF-8 are none."""
        containing = self.terminal(f"{ANY_TEXT} ({' | '.join(map(literal, texts))}) {ANY_TEXT}")
        return self.terminal(f"{ANY_TEXT} & ~{containing}")

    @property
    def space(self) -> Piece:
        """White space between the elements of JSON."""
        if self._whitespace == "":
            return Piece('""', True)
        return self.regex(self._whitespace or r"[ \n\r\t]*")

    def join(self, pieces: Iterable[Piece]) -> Piece:
        """One after the other; regular neighbours become one lexeme."""
        joined: list[Piece] = []
        for piece in itertools.chain.from_iterable(piece.parts or (piece,) for piece in pieces):
            if joined and piece.regular and joined[-1].regular:
                joined[-1] = Piece(f"({joined[-1].expr} {piece.expr})", True)
            else:
                joined.append(piece)
        if len(joined) < 2:
            return joined[0] if joined else Piece('""', True)
        return Piece("(" + " ".join(self.rule(piece) for piece in joined) + ")", False, tuple(joined))

    def either(self, pieces: Iterable[Piece]) -> Piece:
        found = list(pieces)
        regular = all(piece.regular for piece in found)
        return Piece("(" + " | ".join(piece.expr if regular else self.rule(piece) for piece in found) + ")", regular)

    def repeat(self, piece: Piece, least: int, most: int | None) -> Piece:
        inner = f"({piece.expr})" if piece.regular else self.rule(piece)
        return Piece(f"{inner}{{{least},{'' if most is None else most}}}", piece.regular)

    def regex(self, pattern: str) -> Piece:
        return Piece(f"/{llguidance.regex_to_lark(pattern, 'dw')}/", True)

    def json_schema(self, schema: Any) -> Piece:
        """A value of a JSON schema, as xgrammar has it: objects and tuples have only what the schema names. Keywords
        that are not enforced are ignored where ``strict`` refuses the schema."""
        closed = schema if '"allOf"' in json.dumps(schema) else _close(schema)
        if not isinstance(closed, Mapping):
            closed = {"allOf": [closed]}  # a boolean takes no options
        options: dict[str, Any] = {"coerce_one_of": True, "lenient": not _is_enforceable(schema)}
        if self._whitespace == "":
            options["whitespace_flexible"] = False
        elif self._whitespace is not None:
            options["whitespace_pattern"] = self._whitespace
        return Piece(f"%json {json.dumps({**closed, 'x-guidance': options})}", False)

    def ebnf(self, source: str) -> Piece:
        rules = ebnf.parse(source)
        recursive = ebnf.recursive_rules(rules)
        if "root" in recursive:
            names = {name: self._add("r", "") for name in rules}
            for name, expr in rules.items():
                self._set(names[name], _render(expr, names, by_character=True))
            return Piece(names["root"], False)
        names, waiting = {}, ["root"]
        while waiting:
            name = waiting[-1]
            missing = [used for used in ebnf.references(rules[name]) if used not in names]
            waiting += missing
            if not missing:
                waiting.pop()
                if name not in names:
                    names[name] = self.terminal(_render(rules[name], names))
        return Piece(names["root"], True)

    def _add(self, kind: str, expr: str, attributes: str = "") -> str:
        name = f"{kind}{len(self._lines)}"
        self._lines.append("")
        self._set(name, expr, attributes)
        return name

    def _set(self, name: str, expr: str, attributes: str = "") -> None:
        self._lines[int(name[1:])] = f"{name}{attributes}: {expr}"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_enforceable(schema: Any) -> bool:
    try:
        check_enforceable(schema, "")
    except InvalidRequest:
        return False
    return True


def _render(expr: ebnf.Expr, names: Mapping[str, str], by_character: bool = False) -> str:
    def inner(part: ebnf.Expr) -> str:
        return _render(part, names, by_character)

    match expr:
        case ebnf.Text(text):
            return f"({' '.join(map(literal, text))})" if by_character and len(text) > 1 else literal(text)
        case ebnf.Chars(ranges):
            if not ranges:
                raise ebnf.mistake("a class of no characters matches nothing")
            return "/[" + "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges) + "]/"
        case ebnf.Ref(rule):
            return names[rule]
        case ebnf.Sequence(parts):
            return f"({' '.join(map(inner, parts))})" if parts else '""'
        case ebnf.Choice(options):
            return f"({' | '.join(map(inner, options))})"
        case ebnf.Repeat(part, least, most):
            return f"({inner(part)}){{{least},{'' if most is None else most}}}"


def _close(schema: Any) -> Any:
    """Returns the schema with objects and tuples that have only what it names, unless it says what else; in keywords
    that llguidance knows, where others say the same."""
    if isinstance(schema, list):
        return [_close(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            found[key] = {name: _close(part) for name, part in value.items()}
        elif key in _SUBSCHEMAS:
            found[key] = _close(value)
        elif key != "x-guidance":
            found[key] = value
    if not found.keys() & {"anyOf", "oneOf", "$ref"}:
        for key, known in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in found:
                value = found.pop(key)
                found.setdefault(known, value)
    pattern = _names_pattern(found.get("propertyNames"))
    if pattern is not None and not found.keys() & {"properties", "patternProperties"}:
        del found["propertyNames"]
        found["patternProperties"] = {pattern: found.get("additionalProperties", True)}
        found["additionalProperties"] = False
    if "properties" in found and not found.keys() & set(_CLOSED):
        found["additionalProperties"] = False
    if "prefixItems" in found and not found.keys() & {"items", "unevaluatedItems", "additionalItems"}:
        found["items"] = False
    return found


def _names_pattern(names: Any) -> str | None:
    """Returns a pattern for the properties' names of a schema; None for one that has other keywords."""
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return None
    match sorted(names.keys() - {"type"}):
        case ["pattern"]:
            return str(names["pattern"])
        case ["enum"]:
            return f"^({'|'.join(re.escape(str(name)) for name in names['enum'])})$"
        case ["maxLength"] | ["minLength"] | ["maxLength", "minLength"]:
            return f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
    return None


def _unanchored(pattern: str) -> str:
    """Returns a regular expression for all text in which a JSON schema's pattern is found."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    return f"{begin}(?:{pattern.removeprefix('^').removesuffix('$' if not end else '')}){end}"
