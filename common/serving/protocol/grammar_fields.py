"""The grammar that a request states for its answer, in OpenAI's and SGLang's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from ...api.errors import InvalidRequest
from ...api.grammar import GrammarKind, GrammarSpec
from ...parsers.schema_rules import check_enforceable

JsonSource = str | dict[str, Any] | None


class GrammarField(NamedTuple):
    """A grammar, and the request's parameter that states it."""

    spec: GrammarSpec
    param: str


class GrammarFields(Protocol):
    """SGLang's parameters; empty strings state no grammar."""

    @property
    def json_schema(self) -> JsonSource: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def ebnf(self) -> str | None: ...
    @property
    def structural_tag(self) -> JsonSource: ...


def grammar_field(fields: GrammarFields, response_format: dict[str, Any] | None = None) -> GrammarField | None:
    """The grammar of a request, None without one; raises InvalidRequest for several, and for an invalid one."""
    stated = list(_fields(fields))
    if response_format is not None and (field := _response_format(response_format)) is not None:
        stated.append(field)
    if len(stated) > 1:
        raise InvalidRequest(f"{stated[0].param} and {stated[1].param} exclude each other; give one of them.",
                             param=stated[1].param)
    return stated[0] if stated else None


def _fields(fields: GrammarFields) -> Iterator[GrammarField]:
    if fields.json_schema not in (None, ""):
        yield GrammarField(_spec("json_schema", _object(fields.json_schema, "json_schema")), "json_schema")
    if fields.regex:
        yield GrammarField(GrammarSpec("regex", fields.regex), "regex")
    if fields.ebnf:
        yield GrammarField(GrammarSpec("ebnf", fields.ebnf), "ebnf")
    if fields.structural_tag not in (None, ""):
        tag = _object(fields.structural_tag, "structural_tag")
        yield GrammarField(_spec("structural_tag", _tag(tag, "structural_tag")), "structural_tag")


def _response_format(given: dict[str, Any]) -> GrammarField | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return GrammarField(_spec("json_schema", {"type": "object"}), "response_format")
        case "json_schema":
            return _openai_schema(given.get("json_schema"))
        case "structural_tag":
            return GrammarField(_spec("structural_tag", _tag(given, "response_format")), "response_format")
        case other:
            raise InvalidRequest(f"response_format.type must be 'text', 'json_object', 'json_schema' or "
                                 f"'structural_tag', got {str(other)[:80]!r}.", param="response_format.type")


def _openai_schema(given: Any) -> GrammarField:
    param = "response_format.json_schema"
    if not isinstance(given, dict):
        raise InvalidRequest(f"{param} must be an object with a schema.", param=param)
    schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}.schema must be an object.", param=f"{param}.schema")
    if strict not in (None, True, False):
        raise InvalidRequest(f"{param}.strict must be true or false.", param=f"{param}.strict")
    if strict:
        check_enforceable(schema, f"{param}.schema")
    return GrammarField(_spec("json_schema", schema), f"{param}.schema")


def _tag(given: Any, param: str) -> Any:
    """A structural tag in xgrammar's form; SGLang's older one lists ``structures`` and their ``triggers``."""
    if not isinstance(given, dict) or "structures" not in given:
        return given
    structures, triggers = given["structures"], given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest(f"{param}: structures and triggers must be lists.", param=param)
    if any(not isinstance(item, dict) or not item.keys() >= {"begin", "end"} for item in structures):
        raise InvalidRequest(f"{param}: each of structures must have begin, schema and end.", param=param)
    tags = [{"type": "tag", "begin": item["begin"], "end": item["end"],
             "content": {"type": "json_schema", "json_schema": item.get("schema") or {}}} for item in structures]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


def _object(given: JsonSource, param: str) -> Any:
    """JSON that clients send either as it is or in a string."""
    if not isinstance(given, str):
        return given
    try:
        value = json.loads(given)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate, as "\ud800", is no text
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {str(error) or 'nested too deeply'}.", param=param) from None


def _spec(kind: GrammarKind, source: Any) -> GrammarSpec:
    """The grammar as compact JSON; keys keep their order, which is that of an answer's properties."""
    return GrammarSpec(kind, json.dumps(source, ensure_ascii=False, separators=(",", ":")))
