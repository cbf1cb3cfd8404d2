"""tool_choice, parallel_tool_calls and strict: what they mean, and grammars under which they certainly hold."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.api.grammar import GrammarSpec, Vocabulary
from baton.common.config.server import ChatArgs
from baton.common.config.server.answers import GRAMMAR_BACKENDS
from baton.common.parsers.output_parser import ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from baton.common.parsers.tools import JSON_ARRAY, TOOL_FORMATS, detect
from baton.common.serving.chat.answer_form import answer_form
from baton.common.serving.chat.schema import decode_chat
from baton.common.serving.chat.tool_choice import tool_choice
from baton.common.serving.context.served_model import ChatFormats
from baton.tests.helpers.reading_cases import of_pieces

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}, "word": {"enum": ["red", "blue"]}},
              "required": ["n", "word"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}},
         {"type": "function", "function": {"name": "g.h-1"}}]


def formats_of(tools: str, reasoning: str | None = None, template: str | None = None) -> ChatFormats:
    return ChatFormats.select(ChatArgs(tools, reasoning), template)


def request(**fields: Any):
    return decode_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}).encode())


@pytest.mark.parametrize(("fields", "names", "required", "max_calls"), [
    ({}, ["f", "g.h-1"], False, None), ({"tool_choice": "auto"}, ["f", "g.h-1"], False, None),
    ({"tool_choice": "none"}, [], False, None), ({"tool_choice": "required"}, ["f", "g.h-1"], True, None),
    ({"tool_choice": "required", "parallel_tool_calls": False}, ["f", "g.h-1"], True, 1),
    ({"parallel_tool_calls": False}, ["f", "g.h-1"], False, 1),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ["f"], True, 1),
    ({"tools": None}, [], False, None), ({"tools": [], "tool_choice": "auto"}, [], False, None),
])
def test_choices(fields: dict[str, Any], names: list[str], required: bool, max_calls: int | None) -> None:
    choice = tool_choice(request(**fields))
    assert ([tool.function.name for tool in choice.tools], choice.required, choice.max_calls) == (
        names, required, max_calls)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
    ({"tool_choice": "always"}, "tool_choice must be 'none'"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice must be 'none'"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x', which is not among tools"),
    ({"tools": [{"type": "browser", "function": {"name": "f"}}]}, r"tools\[0\].type must be 'function'"),
    ({"tools": [{"function": {"name": "a b"}}]}, r"tools\[0\].function.name must have"),
    ({"tools": [{"function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
     r"tools\[0\].function.parameters: not cannot be enforced"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, r"tools\[1\].function.name 'f' is there twice"),
])
def test_choices_that_mean_nothing(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        tool_choice(request(**fields))


@pytest.mark.parametrize(("template", "name"), [
    ("{{ '<tool_call>\\n{\"name\": ' }} ... \"arguments\"", "qwen25"),
    ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
    ("<tool_call>{{ n }}<arg_key><arg_value>", "glm45"),
    ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3"),
    ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>```json", "deepseekv3"),
    ("<｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜>", "deepseekv31"), ("<|channel|>analysis<|message|>", "gpt-oss"),
    ("<|tool_calls_section_begin|>", "kimi_k2"), ("{{ messages[0].content }}", None),
])
def test_formats_are_detected_in_templates(template: str, name: str | None) -> None:
    assert detect(template) == name


# ---------------------------------------------------------------- grammars


def spoken(spec, seed: int, prefix: str, backend: str = "xgrammar") -> str:
    """A text that a model with one token a byte writes under a grammar: any byte that is allowed, where possible not
    one more of a long row of the same kind."""
    library = pytest.importorskip(backend) and GRAMMAR_BACKENDS.get(backend)
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256], [256])
    matcher = library.state(library.compiler(vocabulary, None).compile(spec))
    mask = np.zeros((1, 9), np.int32)
    dice, said = random.Random(seed), bytearray()
    for byte in prefix.encode():
        assert matcher.accept_token(byte)
        said.append(byte)
    while not matcher.is_terminated():
        assert len(said) < 3000
        matcher.fill_next_token_bitmask(mask, 0)
        bits = mask[0].tolist()
        allowed = [token for token in range(257) if bits[token // 32] >> (token % 32) & 1]
        allowed += [256] if matcher.is_completed() and 256 not in allowed else []
        if 256 in allowed and dice.random() < 0.5:
            break
        printable = [token for token in allowed if 32 < token < 127 or token == 256]
        closing = [token for token in printable if chr(token) in "\",}]<"]
        token = dice.choice(closing if closing and dice.random() < 0.7 else printable or allowed)
        if token == 256:
            break
        assert matcher.accept_token(token)
        said.append(token)
    return said.decode()


@pytest.mark.parametrize("name", sorted({id(value): name for name, value in TOOL_FORMATS.entries().items()}.values()))
@pytest.mark.parametrize(("reasoning", "prompt", "prefix"), [
    (None, "", ""), ("deepseek-r1", "<think>\n", "So.</think>\n"), ("qwen3", "", "<think>Hm</think>")])
@pytest.mark.parametrize(("backend", "seed"), [("xgrammar", 1), ("xgrammar", 2), ("llguidance", 3)])
def test_what_a_grammar_allows_is_calls(name: str, reasoning: str | None, prompt: str, prefix: str, backend: str,
                                        seed: int) -> None:
    formats = formats_of(name, reasoning)
    for fields in ({"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False},
                   {"tool_choice": {"type": "function", "function": {"name": "f"}}}):
        body = request(**fields)
        form = answer_form(formats, body, tool_choice(body), prompt)
        assert form.grammar is not None
        if form.output_format.tools is JSON_ARRAY:
            assert TOOL_FORMATS.get(name).layout is None
        parts = of_pieces(form.output_format, [spoken(form.grammar, seed, prefix, backend)])
        assert (isinstance(parts[0], ReasoningDelta)) is bool(prefix)
        calls = [part.name for part in parts if isinstance(part, ToolCallStart)]
        arguments = [json.loads(part.text) for part in parts if isinstance(part, ToolArgumentsDelta)]
        assert len(calls) == len(arguments) and 2 * len(calls) == len(parts) - bool(prefix)
        assert len(calls) == 1 if tool_choice(body).max_calls == 1 else len(calls) >= 1
        for call, given in zip(calls, arguments):
            if call == "f":
                assert isinstance(given["n"], int) and given["word"] in ("red", "blue") and len(given) == 2
            else:
                assert call == "g.h-1" and given == {}


@pytest.mark.parametrize("name", [name for name, value in TOOL_FORMATS.entries().items()
                                  if value.layout and value.layout.trigger])
def test_strict_tools_of_an_answer_that_may_be_text(name: str) -> None:
    pytest.importorskip("xgrammar")
    body = request()
    form = answer_form(formats_of(name), body, tool_choice(body), "")
    assert form.grammar is not None
    layout = TOOL_FORMATS.get(name).layout
    assert layout is not None
    for seed in range(3):
        beginning = "Well: " + layout.before + layout.tag("f").begin
        parts = of_pieces(form.output_format, [spoken(form.grammar, seed, beginning)])
        assert parts[0] == "Well:" and ToolCallStart in map(type, parts)
        for begun, given in zip(parts, parts[1:]):
            if isinstance(begun, ToolCallStart) and begun.name == "f":
                assert isinstance(given, ToolArgumentsDelta) and set(json.loads(given.text)) == {"n", "word"}
    lax = request(tools=[TOOLS[1]])
    assert answer_form(formats_of(name), lax, tool_choice(lax), "").grammar is None


def accepts(spec, text: str) -> bool:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string
    return _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(spec.text), text)


def test_response_format_with_tools_and_after_reasoning() -> None:
    asked = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"x": {"type": "integer"}},
                                                   "required": ["x"]}))
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 1, "word": "red"}}\n</tool_call>'
    body = request()
    form = answer_form(formats_of("hermes", "qwen3"), body, tool_choice(body), "", asked)
    for text in ('{"x": 1}', call, '<think>hm</think>\n\n{"x": 1}', f"<think>hm</think>{call}"):
        assert accepts(form.grammar, text), text
    for text in ("hello", '{"x": "1"}', call.replace("red", "green"), f'{call}{{"x": 1}}'):
        assert not accepts(form.grammar, text), text
    plain = request(tools=None)
    alone = answer_form(formats_of("hermes", None), plain, tool_choice(plain), "", asked)
    assert alone.grammar == asked
    thinking = answer_form(formats_of("hermes", "deepseek-r1"), plain, tool_choice(plain), "", asked)
    assert accepts(thinking.grammar, 'Hm.</think>{"x": 1}') and not accepts(thinking.grammar, '{"x": 1}')
    closed = answer_form(formats_of("hermes", "qwen3"), plain, tool_choice(plain), "<think></think>\n\n",
                         asked)
    assert accepts(closed.grammar, '{"x": 1}') and not accepts(closed.grammar, '<think>Hm.</think>{"x": 1}')
    harmony = answer_form(formats_of("gpt-oss", "gpt-oss"), plain, tool_choice(plain), "", asked)
    assert accepts(harmony.grammar, '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant'
                                    '<|channel|>final<|message|>{"x": 1}')
    demanding = request(tool_choice="required")
    with pytest.raises(InvalidRequest, match="cannot obey response_format"):
        answer_form(formats_of("hermes", None), demanding, tool_choice(demanding), "", asked)


@pytest.mark.parametrize(("begun", "thought"), [("<think>I", True), ("<think>I</think>So", False), ("So", False)])
def test_an_answer_that_goes_on_within_its_reasoning(begun: str, thought: bool) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": begun}]}]
    body = request(messages=said, tools=None, continue_final_message=True)
    form = answer_form(formats_of("hermes", "deepseek-r1"), body, tool_choice(body), "..." + begun)
    parts = of_pieces(form.output_format, [" am</think> here" if thought else " am here"])
    assert parts == ([ReasoningDelta("am"), "here"] if thought else [" am here"])


@pytest.mark.parametrize("asked", [GrammarSpec("regex", "[a-c]+"), GrammarSpec("ebnf", 'root ::= "abc"')])
def test_other_grammars_after_reasoning(asked: GrammarSpec) -> None:
    body = request(tools=None)
    form = answer_form(formats_of("none", "qwen3"), body, tool_choice(body), "", asked)
    assert accepts(form.grammar, "<think>x</think>abc") and accepts(form.grammar, "abc")
    assert not accepts(form.grammar, "xyz")


def test_formats_by_name() -> None:
    assert formats_of("none", None, "[TOOL_CALLS]") == ChatFormats(None, None)
    assert formats_of("auto", "qwen3", "[TOOL_CALLS]").tools is TOOL_FORMATS.get("mistral")
    assert formats_of("auto").tools is None
    for flag in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')} perl is unknown; it is one of .*none"):
            ChatArgs(**{flag: "perl"})
