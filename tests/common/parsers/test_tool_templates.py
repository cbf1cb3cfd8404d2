"""Chats as templates write them: the shipped ones, and what a request may ask of any."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.config.server import AnswerArgs
from baton.common.parsers.output_format import OutputFormat
from baton.common.parsers.output_parser import ToolArgumentsDelta, ToolCallStart
from baton.common.parsers.tools import TOOL_FORMATS, detect
from baton.common.serving.chat.prompt import chat_prompt, template_messages
from baton.common.serving.chat.schema import decode_chat
from baton.common.serving.chat.tool_choice import tool_choice
from baton.common.tokenizer.named_conversations import NAMED
from baton.common.tokenizer.templates import load_template, shipped
from baton.common.tokenizer.tokenizer import Tokenizer, load_tokenizer
from baton.tests.helpers.reading_cases import of_pieces

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
CALLED = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": "é\\n"}'}}]},
    {"role": "tool", "tool_call_id": "call_123456789", "content": "done"}]
FORMAT_OF = {"chatml": None, "gemma": None, "qwen": "qwen25", "llama-3": "llama3", "mistral": "mistral",
             "deepseek-v3": "deepseekv3"}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: os.PathLike[str]) -> Tokenizer:
    return load_tokenizer(str(checkpoint))


def prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]] = CHAT, **fields: Any) -> str:
    request = decode_chat(json.dumps({"messages": messages, **fields}).encode())
    return chat_prompt(tokenizer, request, tool_choice(request), AnswerArgs())


def test_all_are_known_here() -> None:
    assert shipped() == sorted({*FORMAT_OF, *NAMED})


@pytest.mark.parametrize("name", FORMAT_OF)
def test_shipped_templates(tokenizer: Tokenizer, name: str) -> None:
    """Everything said is there once and in order, and the answer's beginning is the prompt's end."""
    ours = tokenizer.with_chat_template(name)
    text = prompt(ours)
    places = [text.index(word) for word in ("one", "two", "three")]
    assert places == sorted(places) and all(text.count(word) == 1 for word in ("Be brief.", "one", "two", "three"))
    before = prompt(ours, add_generation_prompt=False)
    assert text.startswith(before) and (len(text) > len(before) or name == "mistral")
    assert detect(load_template(name).source) == FORMAT_OF[name]
    assert "{%" not in text and "None" not in text and "Undefined" not in text


@pytest.mark.parametrize("name", [name for name, tools in FORMAT_OF.items() if tools])
def test_shipped_templates_write_calls_as_they_are_read(tokenizer: Tokenizer, name: str) -> None:
    ours = tokenizer.with_chat_template(name)
    text = prompt(ours, CALLED, tools=TOOLS)
    assert '"name": "f"' in text and "done" in text
    said = text[text.index("three") + 5:]
    for marker in ("<|im_start|>assistant\n", "<|end_header_id|>\n\n", "[/INST]", "<｜Assistant｜>"):
        said = said.split(marker, 1)[-1] if marker in said else said
    parts = of_pieces(OutputFormat(TOOL_FORMATS.get(FORMAT_OF[name] or ""), {"f": {}}), [said])
    at = parts.index(ToolCallStart("f"))
    arguments = parts[at + 1]
    assert isinstance(arguments, ToolArgumentsDelta) and json.loads(arguments.text) == {"a": "é\n"}


def test_answers_of_tools_in_a_row(tokenizer: Tokenizer) -> None:
    text = prompt(tokenizer.with_chat_template("qwen"), [*CALLED, {"role": "tool", "content": "more"}], tools=TOOLS)
    assert text.endswith("<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<tool_response>\nmore\n"
                         "</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_thinking_can_be_switched_off(tokenizer: Tokenizer) -> None:
    ours = tokenizer.with_chat_template("qwen")
    assert prompt(ours, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert prompt(ours).endswith("<|im_start|>assistant\n")


def from_source(tokenizer: Tokenizer, source: str) -> Tokenizer:
    return Tokenizer(tokenizer._hf, source)


def test_developers_are_the_system_to_templates_that_do_not_know_them(tokenizer: Tokenizer) -> None:
    said = [{"role": "developer", "content": "x"}, CHAT[1]]
    roles = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert prompt(from_source(tokenizer, roles), said) == "system user "
    assert prompt(from_source(tokenizer, roles + "{# developer #}"), said) == "developer user "


@pytest.mark.parametrize(("expression", "text"), [
    ("arguments | tojson", '{"a": "é\\n"}'), ("'x' + arguments", 'x{"a": "é\\n"}'),
    ("arguments + 'x'", '{"a": "é\\n"}x'),
    ("arguments", '{"a": "é\\n"}'), ("arguments ~ 'x'", '{"a": "é\\n"}x'), ("arguments is mapping", "True"),
    ("arguments.items() | list", "[('a', 'é\\n')]"),
])
def test_arguments_suit_every_kind_of_template(tokenizer: Tokenizer, expression: str, text: str) -> None:
    source = "{% set arguments = messages[-2].tool_calls[0].function.arguments %}{{ " + expression + " }}"
    assert prompt(from_source(tokenizer, source), CALLED) == text


def test_effort_and_other_options_reach_the_template(tokenizer: Tokenizer) -> None:
    ours = from_source(tokenizer, "{{ reasoning_effort }} {{ color }}")
    assert prompt(ours, reasoning_effort="low", chat_template_kwargs={"color": "red"}) == "low red"


def test_an_answer_that_is_gone_on_with(tokenizer: Tokenizer) -> None:
    ours = tokenizer.with_chat_template("chatml")
    said = [CHAT[1], {"role": "assistant", "content": "It is"}]
    assert prompt(ours, said, continue_final_message=True).endswith("assistant\nIt is")
    with pytest.raises(InvalidRequest, match="send one of them"):
        prompt(ours, said, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
def test_parts_that_are_no_text(tokenizer: Tokenizer, part: dict[str, Any]) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\] is of type .*takes text only") as error:
        prompt(tokenizer, said)
    assert error.value.param == "messages[0].content[1]"


def test_unknown_names_are_one_sentence(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="^Cannot read --chat-template nobody: .* chatml, .*_v1.1.$"):
        tokenizer.with_chat_template("nobody")


def test_thoughts_between_calls_have_the_name_that_gpt_oss_s_template_knows() -> None:
    """It refuses thoughts beside content."""
    thought = {"role": "assistant", "reasoning_content": "Hm", "tool_calls": CALLED[4]["tool_calls"]}
    request = decode_chat(json.dumps({"messages": [*CHAT, thought, CALLED[5], {**thought, "content": "So"}]}).encode())
    silent, _, spoken = template_messages(request)[4:]
    assert silent["thinking"] == silent["reasoning_content"] == spoken["reasoning_content"] == "Hm"
    assert "thinking" not in spoken and silent["content"] == ""
