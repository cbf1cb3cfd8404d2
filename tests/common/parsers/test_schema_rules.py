"""Rules of strict schemas: each keyword that a grammar cannot enforce is refused, with its path."""

from __future__ import annotations

from typing import Any

import pytest

from baton.common.api.errors import InvalidRequest
from baton.common.parsers.schema_rules import check_enforceable


@pytest.mark.parametrize("schema", [
    True,
    {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}, "required": ["a"]},
    {"type": "integer", "multipleOf": 0.5, "minimum": 1},
    {"type": "integer", "multipleOf": True},
    {"type": "integer", "multipleOf": -1},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "format": "uuid"}}},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"allOf": [{"type": "string", "minLength": 1}]},
    {"type": "object", "additionalProperties": False, "propertyNames": {"maxLength": 3}},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"enum": ["a"]}, "uniqueItems": False},
    {"type": "object", "properties": [], "required": "a"},
])
def test_enforceable_schemas_pass(schema: Any) -> None:
    check_enforceable(schema, "p")


@pytest.mark.parametrize(("schema", "message"), [
    (5, "p must be an object or a boolean"),
    ({"properties": {"a": 5}}, "p.properties.a must be an object"),
    ({"type": "array", "items": {"uniqueItems": True}}, "p.items: uniqueItems cannot be enforced"),
    ({"anyOf": [{"$ref": "other.json"}]}, r"p.anyOf\[0\]: \$ref 'other.json', which is not inside the schema,"),
    ({"anyOf": [{}], "type": "string"}, "p: anyOf beside type"),
    ({"allOf": [{}, {}]}, "p: allOf of several schemas"),
    ({"type": "string", "format": "color"}, "p: format 'color'"),
    ({"type": "string", "pattern": "a", "minLength": 1}, "p: a length beside pattern or format"),
    ({"type": "number", "multipleOf": 2}, "p: multipleOf 2 of type number"),
    ({"type": ["number", "null"], "multipleOf": 2}, "p: multipleOf 2 of type number"),
    ({"type": "integer", "multipleOf": 0.3}, "p: multipleOf 0.3 cannot"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "p: multipleOf beside minimum"),
    ({"minimum": 1}, "p: minimum without a type"),
    ({"type": "object", "propertyNames": {"maxLength": 3, "format": "email"}}, "p.propertyNames: a length"),
    ({"type": "object", "properties": {}, "required": ["a"]}, "p: required property 'a'"),
])
def test_unenforceable_schemas_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_enforceable(schema, "p")
