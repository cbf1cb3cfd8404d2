"""Writes structural tags (xgrammar's form) in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..api.errors import InvalidRequest
from .lark import Lark, Piece, literal

Node = Mapping[str, Any]
_XML = {"qwen_xml": ("<parameter={}>", "</parameter>"),
        "glm_xml": ("<arg_key>{}</arg_key>", "</arg_value>")}
_NAME = r"/[a-zA-Z_][a-zA-Z0-9_]*/"
_TEXT_CONSTRAINTS = frozenset(("pattern", "format", "minLength", "maxLength", "enum", "const"))


class TagWriter:
    """Writes one structural tag; ``token_ids`` returns the ids of a text's tokens."""

    def __init__(self, lark: Lark, token_id: Callable[[int | str], int]):
        self._lark = lark
        self._token_id = token_id

    def structural_tag(self, source: Any) -> Piece:
        """Raises InvalidRequest for what is no structural tag, or cannot be written in Lark."""
        if not isinstance(source, Mapping) or source.get("type") != "structural_tag" or "format" not in source:
            raise _mistake('it must be an object with type "structural_tag" and a format')
        return self._write(source["format"], ())

    def _write(self, node: Any, ends: tuple[str, ...]) -> Piece:
        """Writes a node and the end of the tag that it fills: one of ``ends``, nothing without them."""
        kind = str(node.get("type") if isinstance(node, Mapping) else None)
        writer = _WRITERS.get(kind)
        if writer is None:
            raise _mistake(f"a format of type {kind[:80]!r} is unknown to this grammar backend")
        write, fields = writer
        if foreign := sorted(name for name in node.keys() - fields - {"type"} if node[name] not in (None, [], False)):
            raise _mistake(f"{foreign[0]} of {kind} is unknown to this grammar backend")
        return write(self, _Fields(kind, node), ends)

    def _ended(self, piece: Piece, ends: tuple[str, ...]) -> Piece:
        if not ends:
            return piece
        return self._lark.join([piece, self._lark.either(Piece(literal(end), True) for end in ends)])

    def _const(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        return self._ended(Piece(literal(node.text("value")), True), ends)

    def _regex(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        return self._ended(self._lark.regex(node.text("pattern")), ends)

    def _grammar(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        return self._ended(self._lark.ebnf(node.text("grammar")), ends)

    def _token(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        return self._ended(Piece(f"<[{self._token_id(node['token'])}]>", False), ends)

    def _any_text(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        return self._lark.any_text(ends, node.get("excludes") or [])

    def _sequence(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        parts = node.nodes("elements")
        return self._lark.join([*(self._write(part, ()) for part in parts[:-1]), self._write(parts[-1], ends)])

    def _or(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        return self._lark.either([self._write(part, ends) for part in node.nodes("elements")])

    def _repeated(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        least, most = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}.get(node.kind) or (
            node.number("min"), node.number("max"))
        return self._ended(self._lark.repeat(self._write(node["content"], ()), least, most), ends)

    def _json_schema(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        schema, style = node["json_schema"], node.get("style") or "json"
        if style == "json":
            return self._ended(self._lark.json_schema(schema), ends)
        if style not in _XML:
            raise _mistake(f"the style {str(style)[:80]!r} is unknown to this grammar backend")
        return self._ended(self._xml(schema, style), ends)

    def _tag(self, node: _Fields, ends: tuple[str, ...], skipped: str = "") -> Piece:
        """A tag without the text ``skipped``, which its beginning begins with."""
        begin, end = node["begin"], node["end"]
        own = tuple(end) if isinstance(end, list) else (self._text_of(end),)
        if not all(isinstance(each, str) for each in own):
            raise _mistake("the end of a tag must be a text or several")
        own = tuple(each for each in own if each)
        if isinstance(begin, Mapping):
            first = self._write(begin, ())
        else:
            first = Piece(literal(node.text("begin")[len(skipped):]), True)
        return self._ended(self._lark.join([first, self._write(node["content"], own)]), ends)

    def _text_of(self, end: Any) -> Any:
        if isinstance(end, Mapping):
            if not isinstance(end.get("token"), str):
                raise _mistake("a tag that ends with a token must name it by its text")
            return end["token"]
        return end

    def _triggered(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        """Any text in which each trigger begins one of the tags."""
        triggers, tags = node["triggers"], node.nodes("tags")
        if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers or [None]):
            raise _mistake("triggers must be texts, at least one")
        excludes = node.get("excludes") or []
        calls = [self._calls(trigger, tags) for trigger in triggers]
        anywhere = self._lark.either([self._lark.join([self._lark.any_text([trigger], [*triggers, *excludes]), call])
                                      for trigger, call in zip(triggers, calls)])
        text = self._lark.any_text(ends, [*triggers, *excludes])
        if not node.get("at_least_one"):
            if node.get("stop_after_first"):
                return self._lark.either([self._ended(anywhere, ends), text])
            return self._lark.join([self._lark.repeat(anywhere, 0, None), text])
        first = self._lark.either([self._lark.join([Piece(literal(trigger), True), call])
                                   for trigger, call in zip(triggers, calls)])
        if node.get("stop_after_first"):
            return self._ended(first, ends)
        return self._lark.join([first, self._lark.repeat(anywhere, 0, None), text])

    def _calls(self, trigger: str, tags: list[Node]) -> Piece:
        """The rests of the tags that begin with a trigger."""
        begun = [_Fields("tag", tag) for tag in tags if str(tag.get("begin")).startswith(trigger)]
        if not begun:
            raise _mistake(f"no tag begins with the trigger {trigger[:80]!r}")
        return self._lark.either([self._tag(tag, (), trigger) for tag in begun])

    def _separated(self, node: _Fields, ends: tuple[str, ...]) -> Piece:
        tag = self._lark.either([self._write(each, ()) for each in node.nodes("tags")])
        found = tag
        if not node.get("stop_after_first"):
            separated = self._lark.join([Piece(literal(node.text("separator")), True), tag])
            found = self._lark.join([tag, self._lark.repeat(separated, 0, None)])
        if not node.get("at_least_one"):
            found = self._lark.repeat(found, 0, 1)
        return self._ended(found, ends)

    def _xml(self, schema: Any, style: str) -> Piece:
        """An object, its properties in the order of the schema, each between markup."""
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise _mistake(f"a schema of style {style} must be one of an object")
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            any_name = self._property(style, Piece(_NAME, True), {}, {})
            return self._lark.join([self._lark.repeat(any_name, 0, None), self._lark.space])
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for name, source in properties.items():
            part = self._property(style, Piece(literal(name), True), source, shared)
            parts.append(part if name in schema.get("required", ()) else self._lark.repeat(part, 0, 1))
        return self._lark.join([*parts, self._lark.space])

    def _property(self, style: str, name: Piece, source: Any, shared: Mapping[str, Any]) -> Piece:
        begin, end = _XML[style]
        head, tail = begin.split("{}")
        markup = [self._lark.space, Piece(literal(head), True), name, Piece(literal(tail), True)]
        if style == "glm_xml":
            markup += [self._lark.space, Piece(literal("<arg_value>"), True)]
        return self._lark.join([*markup, self._value(source, shared, end)])

    def _value(self, source: Any, shared: Mapping[str, Any], end: str) -> Piece:
        """A value and its end: strings as they are, others in JSON."""
        kind = source.get("type") if isinstance(source, Mapping) else None
        is_text = kind == "string" or isinstance(kind, list) and "string" in kind
        if not is_text and isinstance(source, Mapping) and source.keys() & {"type", "enum", "const", "anyOf", "oneOf",
                                                                            "allOf", "$ref"}:
            values = source.get("enum", [source["const"]] if "const" in source else [None])
            if not all(isinstance(value, str) for value in values):
                space = self._lark.space
                return self._lark.join([space, self._lark.json_schema({**shared, **source}), space,
                                        Piece(literal(end), True)])
        if not isinstance(source, Mapping) or not source.keys() & _TEXT_CONSTRAINTS:
            return self._lark.any_text([end])
        return self._lark.join([self._lark.text_of(source, end), Piece(literal(end), True)])


class _Fields:
    """The fields of a node; raises InvalidRequest for one that is missing or of another kind."""

    def __init__(self, kind: str, node: Node):
        self.kind = kind
        self._node = node
        self.get = node.get

    def __getitem__(self, name: str) -> Any:
        if name not in self._node:
            raise _mistake(f"{self.kind} must have {name}")
        return self._node[name]

    def text(self, name: str) -> str:
        return str(self._of(name, str, "a text"))

    def number(self, name: str) -> int:
        return int(self._of(name, int, "a number"))

    def nodes(self, name: str) -> list[Node]:
        found: list[Node] = self._of(name, list, "a list")
        if not found or not all(isinstance(node, Mapping) for node in found):
            raise _mistake(f"{name} of {self.kind} must be a list of objects, at least one")
        return found

    def _of(self, name: str, kind: type, noun: str) -> Any:
        value = self[name]
        if not isinstance(value, kind):
            raise _mistake(f"{name} of {self.kind} must be {noun}")
        return value


_Write = Callable[[TagWriter, _Fields, tuple[str, ...]], Piece]
_WRITERS: dict[str, tuple[_Write, frozenset[str]]] = {
    "const_string": (TagWriter._const, frozenset(("value",))),
    "regex": (TagWriter._regex, frozenset(("pattern",))),
    "grammar": (TagWriter._grammar, frozenset(("grammar",))),
    "token": (TagWriter._token, frozenset(("token",))),
    "any_text": (TagWriter._any_text, frozenset(("excludes",))),
    "sequence": (TagWriter._sequence, frozenset(("elements",))),
    "or": (TagWriter._or, frozenset(("elements",))),
    "optional": (TagWriter._repeated, frozenset(("content",))),
    "plus": (TagWriter._repeated, frozenset(("content",))),
    "star": (TagWriter._repeated, frozenset(("content",))),
    "repeat": (TagWriter._repeated, frozenset(("content", "min", "max"))),
    "json_schema": (TagWriter._json_schema, frozenset(("json_schema", "style"))),
    "qwen_xml_parameter": (lambda writer, node, ends: writer._ended(writer._xml(node["json_schema"], "qwen_xml"), ends),
                           frozenset(("json_schema",))),
    "tag": (TagWriter._tag, frozenset(("begin", "content", "end"))),
    "triggered_tags": (TagWriter._triggered, frozenset(("triggers", "tags", "at_least_one", "stop_after_first",
                                                        "excludes"))),
    "tags_with_separator": (TagWriter._separated, frozenset(("tags", "separator", "at_least_one",
                                                             "stop_after_first"))),
}


def _mistake(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The structural_tag cannot be used as a grammar: {reason}.")


def read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _mistake(f"it is not valid JSON: {error}") from None
