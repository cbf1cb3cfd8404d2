"""Grammars for tool calls: an answer that obeys one can be read, and its arguments are those that the tools declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..structural_tags import Node, const, either, schema, sequence, tag
from .call_emitter import Schemas
from .format import Layout, Tag

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def require_calls(layout: Layout, schemas: Schemas, *, single: bool) -> Node:
    """One or more calls (``single``: exactly one) and nothing else."""
    return sequence([const(layout.before), *_row(layout, schemas, single), const(layout.after)])


def allow_calls(layout: Layout, schemas: Schemas, strict: frozenset[str], *, single: bool) -> Node | None:
    """Any text, in which calls of ``strict`` tools have valid arguments, and calls of others any object.

    None where the format cannot distinguish calls from text.
    """
    if layout.trigger is None:
        return None
    relaxed = relax(schemas, strict)
    if layout.before:
        tags = [tag(layout.before, sequence(_row(layout, relaxed, single)), layout.after)]
    else:
        calls = [(layout.tag(name), source) for name, source in relaxed.items()]
        tags = [tag(call.begin, _arguments(call, source), call.end) for call, source in calls]
    return {"type": "triggered_tags", "triggers": [layout.trigger], "tags": tags,
            "stop_after_first": single or layout.single}


def relax(schemas: Schemas, strict: frozenset[str]) -> Schemas:
    """The schemas, with any object for tools that are not ``strict``."""
    return {name: source if name in strict else {"type": "object"} for name, source in schemas.items()}


def _row(layout: Layout, schemas: Schemas, single: bool) -> list[Node]:
    call = either([_call(layout.tag(name), source) for name, source in schemas.items()])
    if single or layout.single:
        return [call]
    return [call, {"type": "star", "content": sequence([const(layout.between), call])}]


def _call(call: Tag, source: Mapping[str, Any]) -> Node:
    return sequence([const(call.begin), _arguments(call, source), const(call.end)])


def _arguments(call: Tag, source: Mapping[str, Any]) -> Node:
    """The arguments' schema: an object, even where the tool's schema does not say so."""
    return schema({**source, "type": "object"} if source else _NO_ARGUMENTS, call.style)
