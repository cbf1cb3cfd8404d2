from __future__ import annotations

import json

import msgspec
import pytest

from baton.common.api.errors import InvalidRequest
from baton.common.api.messages import Bootstrap, Logprobs
from baton.common.openai.bootstrap import BootstrapFields, bootstraps, check_ranks
from baton.common.openai.chat import template_messages, template_tools
from baton.common.openai.logprobs import chat_logprobs, completion_logprobs, native_logprobs
from baton.common.openai.native import decode_generate
from baton.common.openai.prompts import output_limit, parse_prompts
from baton.common.openai.protocol import decode_chat, decode_completion, sampling_params
from baton.common.openai.responses import encode
from baton.common.openai.tool_calls import HermesParser, Part, ToolCall

USER = {"role": "user", "content": "hi"}


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize(("body", "sentence", "param"), [
    (b"", "body is empty", None),
    (b"{", "not valid JSON", None),
    (b"\xff\xfe", "not valid JSON", None),
    (b'{"model": "\xff"}', "not valid JSON", None),
    (b"[" * 100_000, "JSON|nested|array", None),
    (b"[]", "expected object, got array", None),
    (b"{}", "missing required field messages", None),
    (b'{"messages": "hi"}', "messages: expected array, got str", "messages"),
    (b'{"messages": [{"role": 1}]}', r"messages\[0\]\.role: expected str, got int", "messages[0].role"),
    (chat(temperature="hot"), "temperature: expected float . null, got str", "temperature"),
    (chat(n=0), "n must be between 1 and 128", "n"),
    (chat(n=True), "n: expected int", "n"),
    (chat(top_logprobs=2), "needs logprobs", "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "between 0 and 20", "top_logprobs"),
    (chat(stream_options={"include_usage": True}), "needs stream", "stream_options"),
    (chat(frequency_penalty=0.5), "frequency_penalty is not supported", "frequency_penalty"),
    (chat(logit_bias={"5": 1}), "logit_bias is not supported", "logit_bias"),
    (chat(response_format={"type": "json_object"}), "response_format is not supported", "response_format"),
    (chat(tool_choice="required"), "tool_choice is not supported", "tool_choice"),
])
def test_bad_chat_bodies(body: bytes, sentence: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as error:
        decode_chat(body)
    assert error.value.param == param


def test_nulls_extras_and_harmless_values_are_accepted() -> None:
    request = decode_chat(chat(temperature=None, n=None, user="me", metadata={}, frequency_penalty=0, logit_bias={},
                               presence_penalty=0.0, response_format={"type": "text"}, tool_choice="auto", store=False))
    assert request.num_choices == 1 and request.temperature is None


@pytest.mark.parametrize("fields", [{"best_of": 3}, {"echo": True}, {"suffix": "end"}, {"logprobs": 50}])
def test_completion_fields_that_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        decode_completion(json.dumps({"prompt": "hi", **fields}).encode())


@pytest.mark.parametrize(("fields", "param"), [
    ({"max_tokens": -1}, "max_tokens"), ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_k": -3}, "top_k"), ({"min_p": 2}, "min_p"), ({"seed": 2**70}, "seed"), ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"), ({"stop_token_ids": [100]}, "stop_token_ids"), ({"min_tokens": 20}, "min_tokens"),
])
def test_sampling_values_out_of_range(fields: dict[str, object], param: str) -> None:
    request = decode_completion(json.dumps({"prompt": "hi", **fields}).encode())
    with pytest.raises(InvalidRequest) as error:
        sampling_params(request, request.max_tokens, 16, vocab_size=100)
    assert error.value.param == param


def test_sampling_defaults_and_values() -> None:
    request = decode_completion(b'{"prompt": "a", "stop": "x", "top_k": 0, "seed": 5, "min_tokens": 2}')
    params = sampling_params(request, None, 16, vocab_size=100)
    assert (params.max_new_tokens, params.stop, params.top_k) == (16, ("x",), -1)
    assert (params.seed, params.min_new_tokens) == (5, 2)


@pytest.mark.parametrize("body", [
    {}, {"text": "a", "input_ids": [1]}, {"text": []}, {"input_ids": [[]]}, {"input_ids": [1, [2]]},
    {"text": "a", "sampling_params": []}, {"text": "a", "rid": 5}, {"text": ["a", 1]},
    {"text": "a", "sampling_params": {"regex": "a*"}}, {"text": "a", "input_embeds": [[0.5]]},
])
def test_bad_generate_bodies(body: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        request = decode_generate(json.dumps(body).encode())
        request.samplings(len(request.prompts()))


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(("value", "texts", "ids", "batched"), [
    ("a", ["a"], None, False), (["a"], ["a"], None, True), ([1, 2], None, [[1, 2]], False),
    ([[1], [2, 3]], None, [[1], [2, 3]], True),
])
def test_prompt_shapes(value: object, texts: object, ids: object, batched: bool) -> None:
    prompts = parse_prompts(value, "prompt")  # type: ignore[arg-type]
    assert (prompts.texts, prompts.ids, prompts.batched) == (texts, ids, batched)


@pytest.mark.parametrize("value", ["", [], [""], ["a", ""], [[]], [1, "a"], [[1], "a"]])
def test_bad_prompts(value: object) -> None:
    with pytest.raises(InvalidRequest):
        parse_prompts(value, "prompt")  # type: ignore[arg-type]


def test_output_limit_names_the_numbers() -> None:
    assert output_limit(10, None, 100, tokens_name="max_tokens") == 90
    assert output_limit(10, 90, 100, tokens_name="max_tokens") == 90
    with pytest.raises(InvalidRequest, match="has 100 tokens.*context length of 100"):
        output_limit(100, None, 100, tokens_name="max_tokens")
    with pytest.raises(InvalidRequest, match="10 tokens and max_tokens asks for 91"):
        output_limit(10, 91, 100, tokens_name="max_tokens")


# ---------------------------------------------------------------- bootstrap fields


def test_rooms_of_choices_and_batches() -> None:
    one = BootstrapFields(bootstrap_host="h", bootstrap_port=9, bootstrap_room=100)
    assert bootstraps(one, 2, 2, 8998) == [Bootstrap("h", 9, room) for room in (100, 101, 102, 103)]
    many = BootstrapFields(bootstrap_host=["h", "g"], bootstrap_port=[9, None], bootstrap_room=[50, 70])
    assert bootstraps(many, 2, 2, 8998) == [
        Bootstrap("h", 9, 50), Bootstrap("h", 9, 51), Bootstrap("g", 8998, 70), Bootstrap("g", 8998, 71)]
    assert bootstraps(BootstrapFields(), 2, 1, 8998) == [None, None]


@pytest.mark.parametrize(("fields", "param"), [
    ({"bootstrap_host": "h"}, "bootstrap_room"), ({"bootstrap_room": 1}, "bootstrap_host"),
    ({"bootstrap_port": 1}, "bootstrap_port"),
    ({"bootstrap_host": "", "bootstrap_room": 1}, "bootstrap_host"),
    ({"bootstrap_host": "h", "bootstrap_room": -1}, "bootstrap_room"),
    ({"bootstrap_host": "h", "bootstrap_room": 2**63}, "bootstrap_room"),
    ({"bootstrap_host": "h", "bootstrap_room": 1, "bootstrap_port": 70000}, "bootstrap_port"),
    ({"bootstrap_host": ["h"], "bootstrap_room": [1, 2]}, "bootstrap_host"),
])
def test_bad_bootstrap_fields(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        bootstraps(msgspec.convert(fields, BootstrapFields), 2, 1, 8998)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"])
def test_a_server_has_one_data_parallel_rank(name: str) -> None:
    check_ranks(BootstrapFields())
    check_ranks(BootstrapFields(**{name: 0}))
    for rank in (1, -1):
        with pytest.raises(InvalidRequest, match=f"^{name} must be 0, got {rank}: a server has one") as error:
            check_ranks(BootstrapFields(**{name: rank}))
        assert error.value.param == name


# ---------------------------------------------------------------- chat messages


def test_messages_for_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request = decode_chat(json.dumps({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    ]}).encode())
    assert template_messages(request) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "takes text only"),
    ({"continue_final_message": True}, "last message of the assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
     r"messages\[0\].tool_calls\[0\].function.arguments must be a JSON object"),
])
def test_messages_that_are_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        template_messages(decode_chat(chat(**fields)))


def test_tools_are_offered_unless_declined() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template_tools(decode_chat(chat(tools=tools)).offered_tools) == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    assert template_tools(decode_chat(chat(tools=tools, tool_choice="none")).offered_tools) is None
    with pytest.raises(InvalidRequest, match="must be 'function'"):
        template_tools(decode_chat(chat(tools=[{"type": "browser", "function": {"name": "f"}}])).offered_tools)


# ---------------------------------------------------------------- tool calls


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>'
PARSED = ToolCall("f", '{"a": "é<"}')


def merged(parts: list[Part]) -> list[Part]:
    out: list[Part] = []
    for part in parts:
        if out and isinstance(part, str) and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return out


@pytest.mark.parametrize(("text", "parts"), [
    ("plain < text <tool", ["plain < text <tool"]),
    (" keeps\n white space \n", [" keeps\n white space \n"]),
    (CALL, [PARSED]),
    (f"Sure. \n{CALL}\n\n{CALL}\n", ["Sure.", PARSED, PARSED]),
    (f"{CALL} Done. ", [PARSED, "Done. "]),
    ("<tool_call>not json</tool_call> x", ["<tool_call>not json</tool_call> x"]),
    ('<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    (f"{CALL}<tool_call>{{", [PARSED, "<tool_call>{"]),
])
def test_tool_calls_at_every_cut(text: str, parts: list[Part]) -> None:
    for cut in range(len(text) + 1):
        parser = HermesParser()
        assert merged([*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]) == parts
    parser = HermesParser()
    by_char = [part for char in text for part in parser.push(char)]
    assert merged([*by_char, *parser.finish()]) == parts


def test_content_is_not_delayed() -> None:
    parser = HermesParser()
    assert parser.push("Hello wor") == ["Hello wor"]
    assert parser.push("ld <") == ["ld"]
    assert parser.push("3") == [" <3"]


# ---------------------------------------------------------------- logprobs


def piece(token: int) -> bytes:
    return {1: b"a", 2: "é".encode(), 3: b"\xe2\x82"}[token]


def test_logprobs_in_each_shape() -> None:
    found = Logprobs([1, 3], [-0.5, float("-inf")], [[(1, -0.5), (2, float("-inf"))], [(3, -1.0)]])
    one, two = chat_logprobs(found, piece).content
    assert (one.token, one.logprob, one.bytes, one.top_logprobs[1].bytes) == ("a", -0.5, [97], [0xC3, 0xA9])
    assert (two.token, two.logprob, two.bytes) == ("\N{REPLACEMENT CHARACTER}", -9999.0, [0xE2, 0x82])
    text = completion_logprobs(found, piece, 7)
    assert (text.text_offset, text.top_logprobs) == (
        [7, 8], [{"a": -0.5, "é": -9999.0}, {"\N{REPLACEMENT CHARACTER}": -1.0}])
    assert native_logprobs(Logprobs([1], [None]), None) == [(None, 1, None)]
    assert b"null" not in encode(chat_logprobs(found, piece).content)
