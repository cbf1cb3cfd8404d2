"""Each format of tool calls: what an answer comes to, and that it comes to the same however it arrives."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.api.grammar import GrammarSpec
from baton.common.parsers.cursor import Cursor, ScriptParser, Step
from baton.common.parsers.harmony import MARKERS
from baton.common.parsers.output_format import OutputFormat
from baton.common.parsers.output_parser import OutputDelta, ToolArgumentsDelta, ToolCallStart, joined
from baton.common.parsers.reasoning import REASONING_FORMATS
from baton.common.parsers.structural_tags import node_of
from baton.common.parsers.tools import JSON_ARRAY, TOOL_FORMATS
from baton.common.parsers.tools.grammars import allow_calls
from baton.common.parsers.tools.values import to_json
from baton.tests.helpers.reading_cases import CASES, SCHEMAS, Case, call, of_pieces

IDS = [f"{case.format}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_an_answer_comes_to(case: Case) -> None:
    assert of_pieces(case.reading(), [case.text]) == case.parts


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_cut_in_two_and_char_by_char(case: Case) -> None:
    """Also: what is out after a beginning does not depend on how that came, which continuations rely on."""
    text = case.text
    for at in range(len(text) + 1):
        assert of_pieces(case.reading(), [text[:at], text[at:]]) == case.parts, at
    parser, told = case.reading().new_parser(), []
    for at, char in enumerate(text):
        told += parser.push(char)
        assert joined(told) == joined(case.reading().new_parser().push(text[: at + 1])), at
    assert joined([*told, *parser.finish()]) == case.parts


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_random_cuts_in_three(case: Case) -> None:
    dice = random.Random(len(case.text))
    for _ in range(40):
        first, second = sorted(dice.randint(0, len(case.text)) for _ in range(2))
        pieces = [case.text[:first], case.text[first:second], case.text[second:]]
        assert of_pieces(case.reading(), pieces) == case.parts, (first, second)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_any_cuts_of_any_damaged_answer(case: Case, data: st.DataObject) -> None:
    """A piece is cut out of the answer, and another put somewhere: no format may depend on how the rest arrives."""
    text = case.text
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    text = text[:start] + data.draw(st.text('{}[]"\\,:<>=|ab \n`', max_size=6)) + text[end:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert of_pieces(case.reading(), pieces) == of_pieces(case.reading(), [text])


@pytest.mark.parametrize("name", TOOL_FORMATS.names)
def test_there_are_cases_of_every_format(name: str) -> None:
    assert sum(TOOL_FORMATS.entries().get(case.format) is TOOL_FORMATS.get(name) for case in CASES) >= 6


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_arguments_are_streamed(case: Case) -> None:
    """The name comes out before the arguments are complete, and never after a piece of them."""
    parser, told = case.reading().new_parser(), []
    for char in case.text:
        told += parser.push(char)
    for i, part in enumerate(told):
        if isinstance(part, ToolArgumentsDelta):
            assert any(isinstance(before, ToolCallStart) for before in told[:i])


def test_fragments_of_long_strings() -> None:
    """A file's content in an argument streams, in formats whose arguments are JSON and in those of bare values."""
    body = "line of code\n" * 50
    texts = {
        "hermes": '<tool_call>{"name": "write", "arguments": ' + json.dumps({"text": body}) + "}</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=write>\n<parameter=text>\n{body}\n</parameter>\n</function>",
        "glm45": f"<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{body}</arg_value>\n</tool_call>",
        "gpt-oss": f"<|channel|>commentary to=functions.write<|message|>{json.dumps({'text': body})}",
    }
    for name, text in texts.items():
        parser = OutputFormat(TOOL_FORMATS.get(name), SCHEMAS).new_parser()
        pieces = [part.text for char in text for part in parser.push(char) if isinstance(part, ToolArgumentsDelta)]
        assert len(pieces) > 400, name
        assert json.loads("".join(pieces))["text"].strip() == body.strip()


def test_one_call_at_most() -> None:
    text = ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
            '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
    assert of_pieces(OutputFormat(TOOL_FORMATS.get("hermes"), SCHEMAS, max_calls=1), [text]) == call("add", '{"a": 1}')


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8), st.data())
def test_any_json_passes_as_it_is(value: Any, data: st.DataObject) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=data.draw(st.booleans()), indent=data.draw(
        st.sampled_from([None, 2])))
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    at = data.draw(st.integers(0, len(text)))
    expected: list[OutputDelta] = call("add", arguments)
    assert of_pieces(OutputFormat(TOOL_FORMATS.get("hermes"), SCHEMAS), [text[:at], text[at:]]) == expected


@pytest.mark.parametrize("name", TOOL_FORMATS.names)
def test_floods_of_markup_take_linear_time(name: str) -> None:
    """A model that repeats itself, or a text sent to /parse_function_call, must not stop a server's event loop."""
    began = time.process_time()
    for word in (*TOOL_FORMATS.get(name).markers, "[", "{", '"'):
        text = word * 20_000
        parts = of_pieces(OutputFormat(TOOL_FORMATS.get(name), SCHEMAS), [text])
        assert parts in ([text], [])
    assert time.process_time() - began < 20


@pytest.mark.parametrize(("text", "schema", "value"), [
    ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5"),
    ("5", {"anyOf": [{"type": "string"}, {"type": "boolean"}]}, '"5"'),
    ("True", {"type": ["boolean", "string"]}, "true"),
    ("true", {"type": ["integer", "string"]}, '"true"'),
    ("None", {"type": ["string", "null"]}, "null"),
    ("NaN", {"type": "number"}, '"NaN"'),
    ("[1]", None, "[1]"),
    ("a", {"enum": [1, 2]}, '"a"'),
])
def test_bare_values_become_json(text: str, schema: dict[str, Any] | None, value: str) -> None:
    assert to_json(text, schema) == value


def test_text_after_a_script_s_end_is_content() -> None:
    def script(cursor: Cursor) -> Step[None]:
        yield from cursor.take("<")
        cursor.drop()

    parser = ScriptParser(script)
    assert [parser.push("<a"), parser.push("b"), parser.finish()] == [["a"], ["b"], []]
    assert parser.reasoning_spans == []


def test_joined_parts_are_of_one_kind_each_and_not_empty() -> None:
    parts: list[OutputDelta] = ["a", "", "b", ToolCallStart("f"), ToolArgumentsDelta("{"), ToolArgumentsDelta(""),
                                ToolArgumentsDelta("}")]
    assert joined(parts) == ["ab", ToolCallStart("f"), ToolArgumentsDelta("{}")]


def test_the_markers_of_an_answer() -> None:
    hermes = TOOL_FORMATS.get("hermes")
    assert OutputFormat(hermes).markers == ()  # The request offers no tool.
    assert OutputFormat(hermes, SCHEMAS).markers == hermes.markers
    assert OutputFormat(hermes, SCHEMAS, reasoning=REASONING_FORMATS.get("qwen3")).markers == (
        *hermes.markers, "<think>", "</think>")
    assert OutputFormat(reasoning=REASONING_FORMATS.get("gpt-oss")).markers == MARKERS


def test_calls_that_look_like_text_are_not_enforced_within_text() -> None:
    assert JSON_ARRAY.layout is not None
    assert allow_calls(JSON_ARRAY.layout, SCHEMAS, frozenset(), single=False) is None


def test_a_structural_tag_of_the_old_form_is_no_node() -> None:
    assert node_of(GrammarSpec("structural_tag", '{"structures": []}')) is None
    assert node_of(GrammarSpec("structural_tag", "[]")) is None
    assert node_of(GrammarSpec("structural_tag", '{"format": {"type": "any_text"}}')) == {"type": "any_text"}
