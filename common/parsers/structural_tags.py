"""Builders of xgrammar's structural tags: grammars composed of text, schemas and other grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.grammar import GrammarSpec

Node = dict[str, Any]
"""A node of a structural tag's format."""

ANY_TEXT: Node = {"type": "any_text"}


def const(text: str) -> Node | None:
    return {"type": "const_string", "value": text} if text else None


def schema(source: Any, style: str = "json") -> Node:
    """A value of a JSON schema, in one of xgrammar's styles."""
    return {"type": "json_schema", "json_schema": source, "style": style}


def tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(nodes: Sequence[Node | None]) -> Node:
    given = [node for node in nodes if node is not None]
    return given[0] if len(given) == 1 else {"type": "sequence", "elements": given}


def either(nodes: Sequence[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": list(nodes)}


def optional(node: Node) -> Node:
    return {"type": "optional", "content": node}


def spec(nodes: Sequence[Node | None]) -> GrammarSpec:
    """The grammar of the sequence of ``nodes``."""
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": sequence(nodes)},
                                                    ensure_ascii=False))


def node_of(given: GrammarSpec) -> Node | None:
    """A grammar as a node of another one; None for a structural tag of the old form, which cannot be nested."""
    match given.kind:
        case "json_schema":
            return schema(json.loads(given.text))
        case "regex":
            return {"type": "regex", "pattern": given.text}
        case "ebnf":
            return {"type": "grammar", "grammar": given.text}
    tag_format = json.loads(given.text)
    return tag_format.get("format") if isinstance(tag_format, Mapping) else None
