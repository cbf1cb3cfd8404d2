"""Reasoning apart from the answer, alone and with tool calls behind it, however the answer arrives."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.parsers.output_format import OutputFormat, count_reasoning_tokens
from baton.common.parsers.output_parser import OutputDelta, ReasoningDelta, joined
from baton.common.parsers.reasoning import REASONING_FORMATS, begins_inside
from baton.common.parsers.tools import TOOL_FORMATS
from baton.tests.helpers.reading_cases import SCHEMAS, call, of_pieces

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
KIMI_CALL = ("<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
             '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>')
ADDED = call("add", '{"a": 1}')
HARMONY = ("<|channel|>analysis<|message|>Why?\nSo. <|end|><|start|>assistant<|channel|>commentary to=functions.add "
           '<|constrain|>json<|message|>{"a": 1}<|call|>')


@dataclass(frozen=True)
class Case:
    reasoning: str
    text: str
    parts: list[OutputDelta]
    inside: bool = False
    tools: str | None = None
    separate: bool = True

    def reading(self, *, stream: bool = True) -> OutputFormat:
        return OutputFormat(TOOL_FORMATS.get(self.tools) if self.tools else None, SCHEMAS,
                            reasoning=REASONING_FORMATS.get(self.reasoning),
                            inside=self.inside, separate=self.separate, stream=stream)


CASES = [
    Case("qwen3", "<think>\nHm, 1 < 2.\n\n</think>\n\nIt is é. ", [ReasoningDelta("Hm, 1 < 2."), "It is é. "]),
    Case("qwen3", "No thoughts </think> here", ["No thoughts </think> here"]),
    Case("qwen3", "<think>\n\n</think>\n\nOk", ["Ok"]),
    Case("qwen3", "\n<thin air", ["\n<thin air"]),
    Case("qwen3", "<think>never ends </thi", [ReasoningDelta("never ends </thi")]),
    Case("qwen3", f"<think>Add: {ADD}</think>\n{ADD}", [ReasoningDelta(f"Add: {ADD}"), *ADDED], tools="hermes"),
    Case("qwen3", "<think>\nHm \n</think>\n\nYes", ["<think>\nHm \n</think>\n\nYes"], separate=False),
    Case("qwen3", f"<think>{ADD}</think>{ADD}", [f"<think>{ADD}</think>", *ADDED], tools="hermes", separate=False),
    Case("deepseek-r1", "Hm.\n</think>\nYes", [ReasoningDelta("Hm."), "Yes"], inside=True),
    Case("deepseek-r1", "<think>\nHm.</think>Yes", [ReasoningDelta("Hm."), "Yes"], inside=True),
    Case("deepseek-r1", "still at it \n", [ReasoningDelta("still at it")], inside=True),
    Case("qwen3-thinking", "a</think>b</think>c", [ReasoningDelta("a"), "b</think>c"], inside=True),
    Case("kimi", "◁think▷Hm◁/think▷Yes", [ReasoningDelta("Hm"), "Yes"]),
    Case("kimi_k2", f"<think>I call.{KIMI_CALL}", [ReasoningDelta("I call."), *ADDED], tools="kimi_k2"),
    Case("kimi_k2", f"<think>I call.</think>Now {KIMI_CALL}", [ReasoningDelta("I call."), "Now", *ADDED],
         tools="kimi_k2"),
    Case("glm45", "<think>Hm</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
         [ReasoningDelta("Hm"), *ADDED], tools="glm45"),
    Case("deepseek-v3", "x", ["x"]),
    Case("mistral", "[THINK]Hm[/THINK]Yes", [ReasoningDelta("Hm"), "Yes"]),
    Case("gpt-oss", HARMONY, [ReasoningDelta("Why?\nSo."), *ADDED], tools="gpt-oss"),
    Case("gpt-oss", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
         [ReasoningDelta("Hm"), "Yes"]),
    Case("gpt-oss", "<|channel|>analysis<|message|>Hm", [ReasoningDelta("Hm")]),
    Case("gpt-oss", "<|channel|>analysis<|message|>Hm<|end|><|channel|>final<|message|>Yes", ["HmYes"], separate=False),
]
IDS = [f"{case.reasoning}-{i}" for i, case in enumerate(CASES)]


def test_there_are_cases_of_every_format() -> None:
    assert {case.reasoning for case in CASES} == set(REASONING_FORMATS)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_cut(case: Case) -> None:
    text, dice = case.text, random.Random(len(case.text))
    for at in range(len(text) + 1):
        assert of_pieces(case.reading(), [text[:at], text[at:]]) == case.parts, at
        assert of_pieces(case.reading(stream=False), [text[:at], text[at:]]) == case.parts, at
        first = dice.randint(0, at)
        assert of_pieces(case.reading(), [text[:first], text[first:at], text[at:]]) == case.parts, (first, at)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_out_depends_on_the_text_alone(case: Case, stream: bool) -> None:
    """So that another server, which is given the text in one piece, goes on with what was still to come."""
    parser, told = case.reading(stream=stream).new_parser(), []
    for at, char in enumerate(case.text):
        told += parser.push(char)
        other = case.reading(stream=stream).new_parser()
        assert joined(told) == joined(other.push(case.text[: at + 1])), at
        rest = [*other.push(case.text[at + 1:]), *other.finish()]
        assert joined([*told, *rest]) == case.parts
        assert other.reasoning_spans == case_spans(case, stream)


def case_spans(case: Case, stream: bool) -> list[tuple[int, int]]:
    parser = case.reading(stream=stream).new_parser()
    parser.push(case.text)
    parser.finish()
    return parser.reasoning_spans


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_any_cuts_of_any_damaged_answer(case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(case.text)))
    end = data.draw(st.integers(start, min(len(case.text), start + 10)))
    text = case.text[:start] + data.draw(st.text("<>/|think \n◁▷{", max_size=6)) + case.text[end:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert of_pieces(case.reading(), pieces) == of_pieces(case.reading(), [text])


def test_reasoning_streams_unless_it_should_not() -> None:
    text = "<think>" + "word " * 20 + "</think>Yes"
    for stream, most in ((True, 20), (False, 1)):
        parser = CASES[0].reading(stream=stream).new_parser()
        pieces = [part for char in text for part in parser.push(char) if isinstance(part, ReasoningDelta)]
        assert (len(pieces) >= most) if stream else (len(pieces) == most)


@pytest.mark.parametrize(("name", "prompt", "inside"), [
    ("deepseek-r1", "<｜Assistant｜><think>\n", True), ("deepseek-r1", "<｜Assistant｜>", True),
    ("deepseek-r1", "<｜Assistant｜><think>\n\n</think>\n\n", False), ("qwen3", "<|im_start|>assistant\n", False),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False), ("qwen3", "assistant\n<think>\n", True),
    ("qwen3-thinking", "assistant\n", True),
])
def test_the_prompt_says_whether_reasoning_is_opened(name: str, prompt: str, inside: bool) -> None:
    assert begins_inside(REASONING_FORMATS.get(name), prompt) is inside


def test_tokens_of_reasoning_are_counted() -> None:
    pieces = [b"<think>", b"Hm", b" \xc3", b"\xa9", b".", b"</think>", b"\n\n", b"Yes"]
    text = b"".join(pieces).decode()
    parser = CASES[0].reading().new_parser()
    parser.push(text)
    assert count_reasoning_tokens(parser.reasoning_spans, text, pieces) == 6
    parser = OutputFormat(TOOL_FORMATS.get("gpt-oss"), SCHEMAS, reasoning=REASONING_FORMATS.get("gpt-oss")).new_parser()
    parser.push(HARMONY)
    tokens = [char.encode() for char in HARMONY]
    assert count_reasoning_tokens(parser.reasoning_spans, HARMONY, tokens) == HARMONY.index("<|end|>")
