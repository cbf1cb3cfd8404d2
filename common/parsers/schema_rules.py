"""The rules of ``strict`` JSON schemas: keywords that a grammar cannot enforce are refused.

Without ``strict`` such keywords are ignored, as OpenAI and SGLang do: the answer is then JSON of about that shape. The
rules are xgrammar's limits (0.2.8), each tried with a value that breaks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..api.errors import InvalidRequest

_UNENFORCED = frozenset((
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "dependentRequired",
    "dependentSchemas", "dependencies", "contentEncoding", "contentMediaType", "contentSchema", "$dynamicRef"))
_FORMATS = frozenset((
    "email", "date", "time", "date-time", "duration", "uri", "uri-reference", "uri-template", "uuid", "ipv4", "ipv6",
    "hostname", "json-pointer", "relative-json-pointer"))
_ANNOTATIONS = frozenset((
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly", "discriminator"))
_OF_TYPES = {
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
}
_CHOICES = ("$ref", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ONES = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")


def check_enforceable(schema: Any, param: str) -> None:
    """Raises InvalidRequest, naming the path below ``param``, for a keyword that a grammar would not enforce."""
    open_parts = [(schema, "")]
    while open_parts:
        part, path = open_parts.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise InvalidRequest(f"{param}{path} must be an object or a boolean, as JSON Schema has it.", param=param)
        problem = next(_problems(part), None)
        if problem is not None:
            raise InvalidRequest(f"{param}{path}: {problem} cannot be enforced; change it, or leave strict out.",
                                 param=param, code="invalid_grammar")
        open_parts += _parts(part, path)


def _parts(part: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    for name in _MAPS:
        if isinstance(part.get(name), dict):
            yield from ((value, f"{path}.{name}.{key}") for key, value in part[name].items())
    for name in _LISTS:
        if isinstance(part.get(name), list):
            yield from ((value, f"{path}.{name}[{i}]") for i, value in enumerate(part[name]))
    for name in _ONES:
        if name in part:
            yield part[name], f"{path}.{name}"
    if isinstance(part.get("propertyNames"), dict):
        yield {"type": "string", **part["propertyNames"]}, f"{path}.propertyNames"


def _multiple_problems(part: dict[str, Any]) -> Iterator[str]:
    """``multipleOf`` is enforced only for integers, by whole numbers, and without bounds."""
    step, kinds = part["multipleOf"], part.get("type")
    if not isinstance(step, (int, float)) or isinstance(step, bool) or step <= 0:
        return
    if kinds == "number" or (isinstance(kinds, list) and "number" in kinds):
        yield f"multipleOf {step} of type number"
    elif step % 1 and (1 / step) % 1:  # every integer is a multiple of 0.5, or of 0.1
        yield f"multipleOf {step}"
    elif not step % 1 and (bounds := sorted(part.keys() & _OF_TYPES["number"] - {"multipleOf"})):
        yield f"multipleOf beside {', '.join(bounds)}"


def _problems(part: dict[str, Any]) -> Iterator[str]:
    """The keywords of one subschema that a grammar cannot enforce; its compiler checks the values' types."""
    keys = part.keys() - _ANNOTATIONS
    yield from sorted(name for name in keys & _UNENFORCED if part[name] is not False)
    ref = part.get("$ref")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        yield f"$ref {ref!r}, which is not inside the schema,"
    for name in _CHOICES:
        if name in keys and len(keys) > 1:
            yield f"{name} beside {', '.join(sorted(keys - {name}))}"
    if isinstance(options := part.get("allOf"), list) and len(options) > 1:
        yield "allOf of several schemas"
    if isinstance(shape := part.get("format"), str) and shape not in _FORMATS:
        yield f"format {shape[:80]!r}"
    if keys & {"pattern", "format"} and keys & {"minLength", "maxLength"}:
        yield "a length beside pattern or format"
    if "multipleOf" in keys:
        yield from _multiple_problems(part)
    if "type" not in part and not keys & {"const", "enum"}:
        yield from (f"{min(found)} without a type" for names in _OF_TYPES.values() if (found := keys & names))
    required, declared = part.get("required"), part.get("properties", {})
    if isinstance(required, list) and isinstance(declared, dict):
        yield from (f"required property {name[:80]!r}, which properties do not declare," for name in required
                    if isinstance(name, str) and name not in declared)
