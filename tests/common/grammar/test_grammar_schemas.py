"""Every answer by a JSON schema is valid under it: 219 schemas, by hand and drawn, greedy and sampled."""

from __future__ import annotations

import json

import jsonschema
import pytest
import xgrammar

from baton.common.api.errors import InvalidRequest
from baton.common.api.grammar import GrammarSpec, Vocabulary
from baton.common.config.server.answers import GRAMMAR_BACKENDS
from baton.common.grammar.xgrammar_compiler import Compiler
from baton.common.parsers.schema_rules import check_enforceable
from baton.tests.helpers.grammar_engine import GrammarEngine, schema_spec, text_of, tokenizer, vocabulary
from baton.tests.helpers.json_schemas import BY_HAND, CORPUS

ENDLESS = {"recursive list"}  # the likeliest next element is one more
SAMPLED = {"temperature": 1.0}


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request) -> str:
    return request.param


def check_answers(backend, names, *, whitespace, **sampling):
    if backend == "llguidance":  # a number between bounds may have digits without end
        names = [name for name in names if '"number"' not in json.dumps(CORPUS[name])]
    engine = GrammarEngine(backend=backend, whitespace=whitespace, max_running=128)
    for i, name in enumerate(names):
        seed = {"seed": i} if sampling else {}
        engine.start(name, schema_spec(CORPUS[name]), f"Tell me about {name}.", max_new_tokens=500, **sampling, **seed)
    answers = engine.run()
    for name in names:
        assert engine.reasons.get(name) == "stop", (name, answers[name])
        value = json.loads(text_of(answers[name]))
        jsonschema.Draft202012Validator(
            CORPUS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(value)


def test_the_corpus_is_large_and_the_same_everywhere():
    from baton.tests.helpers.json_schemas import generated

    assert len(CORPUS) >= 200 and generated(170).items() <= CORPUS.items()
    for schema in CORPUS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_sampled_answers_are_valid(backend):
    check_answers(backend, list(CORPUS)[::1 if backend == "xgrammar" else 2], whitespace="", **SAMPLED)


def test_greedy_answers_are_valid(backend):
    check_answers(backend, [name for name in list(CORPUS)[::3] if name not in ENDLESS], whitespace="[ ]?")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("whitespace", ["", "[ ]?", "[ \\n]{0,3}"])
def test_all_answers_are_valid(backend, whitespace, sampling):
    check_answers(backend, [name for name in CORPUS if name not in ENDLESS], whitespace=whitespace, **sampling)


def accepts(backend: str, whitespace: str | None, schema, text: str) -> bool:
    """Whether tokens of ``text`` are an answer that may end there."""
    library = GRAMMAR_BACKENDS.get(backend)
    matcher = library.state(library.compiler(vocabulary(), whitespace).compile(schema_spec(schema)))
    tokens = tokenizer().encode(text, add_special_tokens=False)
    return all(map(matcher.accept_token, tokens)) and matcher.is_completed()


VALUE = {"größe": [1, 2], "ok": True}
VALUE_SCHEMA = {"type": "object", "properties": {"größe": {"type": "array", "items": {"type": "integer"}},
                                                 "ok": {"type": "boolean"}}, "required": ["größe", "ok"]}


@pytest.mark.parametrize(("whitespace", "indented", "spaced", "compact"), [
    (None, True, True, True), ("", False, False, True), ("[ ]?", False, True, True), ("[ ]", False, False, False),
    ("[ \\n]*", True, True, True)])
def test_white_space(backend, whitespace, indented, spaced, compact):
    if whitespace == "[ ]" and backend == "llguidance":
        spaced = compact = True  # there may be none wherever there may be some
    found = [accepts(backend, whitespace, VALUE_SCHEMA, json.dumps(VALUE, ensure_ascii=False, **style))
             for style in ({"indent": 2}, {}, {"separators": (",", ":")})]
    assert found == [indented, spaced, compact]


@pytest.mark.parametrize("whitespace", [None, "", "[ ]?"])
def test_white_space_inside_strings_is_the_schemas_own(backend, whitespace):
    parts = [{"const": "[ \n\r\t]*"}, {"type": "string", "pattern": "^[ \\n\\r\\t]*x$"}, {"enum": ["[ \\n\\r\\t]*"]}]
    schema = {"type": "array", "prefixItems": parts, "items": False, "minItems": 3}
    value = ["[ \n\r\t]*", "   x", "[ \\n\\r\\t]*"]
    assert accepts(backend, whitespace, schema, json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize(("name", "value"), [
    ("unicode names", {"größe": 3, "名前": "x", "emoji 😀": True}), ("unicode values", "Grüße"),
    ("unicode values", "😀😀"), ("unicode const", {"city": "Zürich – São Paulo"}),
    ("names to escape", {'a"b': 1, "c\\d": 2, "e\tf": 3}), ("const with quotes", 'a "quoted" back\\slash\nand a line')])
@pytest.mark.parametrize("whitespace", [None, "", "[ ]?"])
def test_characters_beyond_ascii(backend, name, value, whitespace):
    jsonschema.validate(value, BY_HAND[name])
    assert accepts(backend, whitespace, BY_HAND[name], json.dumps(value, ensure_ascii=False, separators=(",", ":")))


BYTES = Vocabulary([*(bytes([i]) for i in range(256)), b""], [256], [256])
ODD = ('"', "\\", "\n", "\t", "\x01", "\x0b", "\x0c")
REFUSED = ['^a"b$', "^\\\\$", "^\\n$", '^["]$', '^(x"y|z)$', "^\\u0022$", "^\\x5c+$", "^[\\u0000-\\u001f]$",
           "^\\cA$", "^\\v$", "^\n$", '^(?:\\"x)+$', "^[\\n\\t]$", '^a"*b$', "^\\u{5C}$"]
TAKEN = ["^[^x]$", "^.$", "^\\s$", "^[\\x00-\\x7f]$", "^\\W$", '^["x]$', "^[\\s\\S]$", "^\\/$", "^[!-~]$",
         '^[^"]{1,3}$', "^[^]a]$", "^\\d\\.\\d$", "^[-\\]x]$"]


@pytest.mark.parametrize("pattern", [*REFUSED, *TAKEN])
def test_strings_of_a_pattern_are_json(pattern):
    """By a vocabulary of single bytes, of which a model may choose any."""
    def compiled(spec):
        return Compiler(BYTES, None).compile(spec)

    spec = schema_spec({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"pattern": pattern}}}
    keys = schema_spec({"type": "object", "patternProperties": {pattern: {}}})
    if pattern in REFUSED:
        for one in (spec, keys, GrammarSpec("structural_tag", json.dumps(tag))):
            with pytest.raises(InvalidRequest, match="which JSON writes with an escape"):
                compiled(one)
        return
    grammar = compiled(schema_spec({"type": "string", "pattern": pattern}))
    for text in ODD:
        matcher = xgrammar.GrammarMatcher(grammar)
        assert not all(map(matcher.accept_token, f'"{text}"'.encode())), text


def test_patterns_elsewhere_are_not_looked_at():
    for schema in ({"const": {"pattern": '"'}}, {"type": "object", "properties": {"pattern": {"type": "string"}}}):
        Compiler(BYTES, None).compile(schema_spec(schema))
    Compiler(BYTES, None).compile(GrammarSpec("regex", 'a"b'))
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": 'a"b'}}
    Compiler(BYTES, None).compile(GrammarSpec("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("schema", [
    {"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 0.1}, {"type": ["integer", "null"],
                                                                                "multipleOf": 2.0}])
def test_multiples_that_are_enforced(schema):
    check_enforceable(schema, "schema")


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_can_be_enforced(name):
    check_enforceable(CORPUS[name], "schema")


@pytest.mark.parametrize(("schema", "place", "problem"), [
    ({"type": "array", "uniqueItems": True}, "schema:", "uniqueItems"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "schema.properties.a:", "not"),
    ({"if": {}, "then": {}}, "schema:", "if"),
    ({"type": "array", "items": {"type": "string", "format": "regex"}}, "schema.items:", "format 'regex'"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "schema:", "a length beside pattern"),
    ({"type": "number", "multipleOf": 0.01}, "schema:", "multipleOf 0.01 of type number"),
    ({"type": ["null", "number"], "multipleOf": 2}, "schema:", "multipleOf 2 of type number"),
    ({"type": "integer", "multipleOf": 2.5}, "schema:", "multipleOf 2.5"),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, "schema:", "multipleOf beside minimum"),
    ({"$ref": "http://else.where/schema"}, "schema:", "not inside the schema"),
    ({"$ref": "#/$defs/a", "minimum": 3}, "schema:", "$ref beside minimum"),
    ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "schema:", "allOf of several"),
    ({"minimum": 3}, "schema:", "minimum without a type"),
    ({"type": "object", "required": ["x"]}, "schema:", "'x'"),
    ({"$defs": {"d": {"anyOf": [{"type": "array", "contains": {}}]}}}, "schema.$defs.d.anyOf[0]:", "contains"),
    ({"type": "array", "items": [1]}, "schema.items", "must be an object"),
])
def test_what_a_grammar_cannot_enforce_is_refused(schema, place, problem):
    with pytest.raises(InvalidRequest) as caught:
        check_enforceable(schema, "schema")
    assert caught.value.message.startswith(place) and problem in caught.value.message and caught.value.param == "schema"


@pytest.mark.parametrize("pattern", [pattern for pattern in [*REFUSED, *TAKEN] if pattern != "^\\cA$"])
def test_strings_of_a_pattern_are_escaped(pattern):
    """llguidance matches a pattern against the string that JSON stands for."""
    library = GRAMMAR_BACKENDS.get("llguidance")
    grammar = library.compiler(BYTES, None).compile(schema_spec({"type": "string", "pattern": pattern}))
    for text in ODD:
        state = library.state(grammar)
        assert not all(map(state.accept_token, f'"{text}"'.encode())) or not state.is_completed(), text
    if pattern == '^a"b$':
        assert all(map(library.state(grammar).accept_token, b'"a\\"b"'))


@pytest.mark.parametrize(("schema", "good", "bad"), [
    ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "integer"}},
     '{"ab":1}', '{"abc":1}'),
    ({"type": "object", "propertyNames": {"enum": ["a.b"]}}, '{"a.b":null}', '{"axb":null}'),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, '{"x1":2}', '{"y":2}'),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, '{"a":1}', '{"a":1,"b":2}'),
    ({"type": "object", "properties": {"a": {}}}, '{"a":1}', '{"a":1,"b":2}'),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, '{"a":1,"b":2}', '{"a"'),
    ({"type": "array", "prefixItems": [{"type": "integer"}]}, "[1]", "[1,2]"),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "boolean"}}, "[1,true]",
     "[1,2]"),
    ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, "1", '"a"'),
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "[1,1]", '["a"]'),
    ({"type": "integer", "x-guidance": {"lenient": True}}, "7", "true"),
    (True, "[1]", "]"),
], ids=json.dumps)
def test_keywords_in_llguidance(schema, good, bad):
    """Objects and tuples are closed as xgrammar closes them; keywords that it lacks are said in others."""
    library = GRAMMAR_BACKENDS.get("llguidance")
    grammar = library.compiler(BYTES, "").compile(schema_spec(schema))
    for text, expected in ((good, True), (bad, False)):
        state = library.state(grammar)
        assert (all(map(state.accept_token, text.encode())) and state.is_completed()) is expected, text


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "string", "format": "uri-template"}, "Unknown format: uri-template"), ({"type": "strnig"}, "strnig"),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 3}}, "propertyNames"),
    (False, "false"), ({"type": "string", "pattern": "^\\cA$"}, "unrecognized escape")])
def test_what_strict_takes_and_llguidance_cannot_enforce_is_refused(schema, words):
    with pytest.raises(InvalidRequest, match=words):
        GRAMMAR_BACKENDS.get("llguidance").compiler(BYTES, "").compile(schema_spec(schema))
