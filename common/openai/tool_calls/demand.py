"""Grammars for tool calls: an answer that obeys one can be read, and its arguments are those that the tools declare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...api.grammar import GrammarSpec
from ..reasoning.format import ReasoningFormat
from .calls import Schemas
from .format import Layout, Tag

Node = dict[str, Any]
"""A format of xgrammar's structural tags."""

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def demand_calls(layout: Layout, schemas: Schemas, *, single: bool, before: Sequence[Node] = ()) -> GrammarSpec:
    """One or more calls (``single``: exactly one) and nothing else, behind what ``before`` takes."""
    return _spec([*before, _const(layout.before), *_row(layout, schemas, single), _const(layout.after)])


def allow_calls(layout: Layout, schemas: Schemas, strict: frozenset[str], *, single: bool,
                before: Sequence[Node] = ()) -> GrammarSpec | None:
    """Any text, in which calls of ``strict`` tools have valid arguments, and calls of others some object.

    None where the format cannot tell calls from text.
    """
    if layout.trigger is None:
        return None
    loose = {name: schema if name in strict else {"type": "object"} for name, schema in schemas.items()}
    if layout.before:
        content = _sequence(_row(layout, loose, single))
        tags = [{"type": "tag", "begin": layout.before, "content": content, "end": layout.after}]
    else:
        parts = [(layout.tag(name), schema) for name, schema in loose.items()]
        tags = [{"type": "tag", "begin": tag.begin, "content": _arguments(tag, schema), "end": tag.end}
                for tag, schema in parts]
    free = {"type": "triggered_tags", "triggers": [layout.trigger], "tags": tags, "stop_after_first": single}
    return _spec([*before, free])


def reasoning_before(reasoning: ReasoningFormat | None, inside: bool) -> list[Node]:
    """What may stand before calls: the model's reasoning, whose rest it is where the prompt has opened it."""
    if reasoning is None:
        return []
    if reasoning.harmony:
        return [{"type": "optional", "content": {
            "type": "tag", "begin": "<|channel|>analysis<|message|>", "content": {"type": "any_text"},
            "end": "<|end|><|start|>assistant"}}]
    tag = {"type": "tag", "begin": "" if inside else reasoning.opener, "content": {"type": "any_text"},
           "end": reasoning.closer}
    space = {"type": "regex", "pattern": r"\n{0,2}"}
    return [tag, space] if inside else [{"type": "optional", "content": _sequence([tag, space])}]


def _row(layout: Layout, schemas: Schemas, single: bool) -> list[Node]:
    call = _either([_call(layout.tag(name), schema) for name, schema in schemas.items()])
    if single or layout.single:
        return [call]
    return [call, {"type": "star", "content": _sequence([_const(layout.between), call])}]


def _call(tag: Tag, schema: Mapping[str, Any]) -> Node:
    return _sequence([_const(tag.begin), _arguments(tag, schema), _const(tag.end)])


def _arguments(tag: Tag, schema: Mapping[str, Any]) -> Node:
    return {"type": "json_schema", "json_schema": _object(schema), "style": tag.style}


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whatever a tool's schema leaves out."""
    return {**schema, "type": "object"} if schema else _NO_ARGUMENTS


def _const(text: str) -> Node | None:
    return {"type": "const_string", "value": text} if text else None


def _sequence(nodes: Sequence[Node | None]) -> Node:
    kept = [node for node in nodes if node is not None]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def _either(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}


def _spec(nodes: Sequence[Node | None]) -> GrammarSpec:
    tag = {"type": "structural_tag", "format": _sequence(nodes)}
    return GrammarSpec("structural_tag", json.dumps(tag, ensure_ascii=False))
