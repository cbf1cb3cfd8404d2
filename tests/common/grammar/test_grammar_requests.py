"""What requests may say about structured output, and how mistakes are told."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from baton.common.api.errors import InvalidRequest
from baton.common.api.grammar import GrammarSpec
from baton.common.serving.chat.schema import decode_chat
from baton.common.serving.completions.schema import decode_completion
from baton.common.serving.native.schema import NativeSampling
from baton.common.serving.protocol.grammar_fields import grammar_field

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
COMPACT = json.dumps(SCHEMA, separators=(",", ":"))
NEW_TAG = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
    {"type": "tag", "begin": "<f>", "end": "</f>", "content": {"type": "json_schema", "json_schema": SCHEMA}}]}}
OLD_TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
           "triggers": ["<f"]}


def grammar(**fields: Any) -> GrammarSpec | None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    chat, text = decode_chat(body), decode_completion(json.dumps({"prompt": "x", **fields}).encode())
    field = grammar_field(chat, chat.response_format)
    assert field == grammar_field(text, text.response_format)
    return field and field.spec


@pytest.mark.parametrize("fields", [
    {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"regex": ""}, {"ebnf": None},
    {"json_schema": ""}, {"structural_tag": ""}])
def test_nothing_is_asked(fields):
    assert grammar(**fields) is None


@pytest.mark.parametrize(("fields", "kind", "text"), [
    ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
     "json_schema", COMPACT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
     "json_schema", COMPACT),
    ({"response_format": NEW_TAG}, "structural_tag", NEW_TAG),
    ({"response_format": OLD_TAG}, "structural_tag", NEW_TAG),
    ({"structural_tag": json.dumps(OLD_TAG)}, "structural_tag", NEW_TAG),
    ({"structural_tag": NEW_TAG}, "structural_tag", NEW_TAG),
    ({"json_schema": SCHEMA}, "json_schema", COMPACT), ({"json_schema": json.dumps(SCHEMA)}, "json_schema", COMPACT),
    ({"regex": "a+"}, "regex", "a+"), ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"')])
def test_every_form_states_the_same_grammar(fields, kind, text):
    found = grammar(**fields)
    assert found is not None and found.kind == kind
    assert found.text == text if isinstance(text, str) else json.loads(found.text) == text
    if "response_format" not in fields:
        assert NativeSampling(**fields).params(9, 50).grammar == found


@pytest.mark.parametrize(("fields", "param"), [
    ({"regex": "a", "json_schema": "{}"}, "regex"), ({"ebnf": "a", "response_format": {"type": "json_object"}},
                                                     "response_format"),
    ({"json_schema": '{"a"'}, "json_schema"), ({"json_schema": '{"const": "\\ud800"}'}, "json_schema"),
    ({"structural_tag": "[" * 100_000}, "structural_tag"),
    ({"response_format": {}}, "response_format.type"), ({"response_format": {"type": ["x"]}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": "{}"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
     "response_format.json_schema.strict"),
    ({"response_format": {**OLD_TAG, "structures": [{"begin": "<f>"}]}}, "response_format"),
    ({"response_format": {**OLD_TAG, "triggers": None}}, "response_format"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_mistakes_name_their_parameter(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        grammar(**fields)
    assert caught.value.param == param and caught.value.message.endswith(".")


def test_nothing_but_invalid_request_whatever_the_schema():
    """Schemas of random JSON under JSON Schema's keywords, with values of any type."""
    draw = random.Random(1)
    keywords = ["type", "properties", "items", "required", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "format",
                "pattern", "minLength", "minimum", "additionalProperties", "prefixItems", "propertyNames", "not"]

    def value(depth: int) -> Any:
        kind = draw.randrange(8 if depth else 5)
        if kind < 5:
            return [None, True, 3.5, draw.choice(["string", "object", "#/a", "", "é"]), 0][kind]
        if kind == 5:
            return [value(depth - 1) for _ in range(draw.randrange(3))]
        return {draw.choice(keywords): value(depth - 1) for _ in range(draw.randrange(4))}

    outcomes = set()
    none = SimpleNamespace(json_schema=None, regex=None, ebnf=None, structural_tag=None)
    for _ in range(3000):
        body = {"type": "json_schema", "json_schema": {"schema": value(4), "strict": True}}
        try:
            outcomes.add(grammar_field(none, body) is not None)
        except InvalidRequest:
            outcomes.add("refused")
    assert outcomes == {True, "refused"}
