"""Bare argument values, written without JSON's quotes, converted to JSON by the argument's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def is_string(schema: Schema | None) -> bool:
    """True where the schema allows only strings, so that a bare value is one as it is."""
    if schema is None:
        return False
    kind, choices = schema.get("type"), schema.get("enum")
    if kind is None and isinstance(choices, list) and choices:
        return all(isinstance(choice, str) for choice in choices)
    return kind == "string" or kind == ["string"]


def to_json(text: str, schema: Schema | None) -> str:
    """A bare value as JSON: of a type other than string where it parses as that, else a string."""
    stripped = text.strip()
    kinds = _kinds(schema)
    if stripped in ("True", "False", "None") or stripped.lower() in ("true", "false", "null"):
        stripped = {"none": "null"}.get(stripped.lower(), stripped.lower())
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    if "string" in kinds and value is not None and not _is_a(value, kinds - {"string"}):
        return quoted(value if isinstance(value, str) else text)
    return stripped


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: Schema | None) -> set[str]:
    """The types that a schema allows, empty where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else {k for k in kind if isinstance(k, str)} if isinstance(
        kind, list) else set()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            kinds |= _kinds(option)
    return kinds


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "boolean": (bool,), "integer": (int,), "number": (int, float),
    "null": (type(None),)}


def _is_a(value: Any, kinds: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES.get(kind, ())) for kind in kinds)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
