from __future__ import annotations

import json

import msgspec
import pytest

from baton.common.api.errors import InvalidRequest
from baton.common.api.messages import Bootstrap, Generate, Logprobs, decode_to_engine
from baton.common.api.messages import encode as encode_message
from baton.common.api.wire import Int32
from baton.common.serving.chat.prompt import template_messages, template_options
from baton.common.serving.chat.schema import decode_chat
from baton.common.serving.completions.schema import decode_completion
from baton.common.serving.native.schema import decode_generate, logprob_options
from baton.common.serving.protocol.bootstrap import BootstrapFields, bootstraps, requested_dp_rank
from baton.common.serving.protocol.decoding import BodyDecoder
from baton.common.serving.protocol.encoding import encode
from baton.common.serving.protocol.logprobs import chat_logprobs, completion_logprobs, native_lists, native_logprobs
from baton.common.serving.protocol.prompts import output_limit, parse_prompts
from baton.common.serving.protocol.sampling import sampling_params

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
    (chat(logit_bias={"5": "much"}), "logit_bias.*: expected float, got str", "logit_bias[...]"),
])
def test_bad_chat_bodies(body: bytes, sentence: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as error:
        decode_chat(body)
    assert error.value.param == param


def test_nulls_extras_and_harmless_values_are_accepted() -> None:
    request = decode_chat(chat(temperature=None, n=None, user="me", metadata={}, frequency_penalty=0, logit_bias={},
                               presence_penalty=0.0, response_format={"type": "text"}, tool_choice="auto", store=False))
    assert request.num_choices == 1 and request.temperature is None


@pytest.mark.parametrize("fields", [
    {"best_of": 3, "stream": True}, {"best_of": 2, "n": 3}, {"best_of": 129}, {"logprobs": 6},
    {"logprobs": -1}])
def test_completion_fields_that_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))) as error:
        decode_completion(json.dumps({"prompt": "hi", **fields}).encode())
    assert error.value.param == next(iter(fields))


@pytest.mark.parametrize(("fields", "param"), [
    ({"max_tokens": -1}, "max_tokens"), ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_k": -3}, "top_k"), ({"min_p": 2}, "min_p"), ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"), ({"stop_token_ids": [100]}, "stop_token_ids"), ({"min_tokens": 20}, "min_tokens"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"), ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"logit_bias": {"100": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 200}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
])
def test_sampling_values_out_of_range(fields: dict[str, object], param: str) -> None:
    request = decode_completion(json.dumps({"prompt": "hi", **fields}).encode())
    with pytest.raises(InvalidRequest) as error:
        sampling_params(request, request.max_tokens, 16, vocab_size=100)
    assert error.value.param == param


@pytest.mark.parametrize(("name", "value"), [
    ("max_tokens", 2**31), ("seed", 2**63), ("seed", -(2**63) - 1), ("priority", 2**31), ("temperature", 1e39),
    ("bootstrap_room", 2**63), ("disagg_prefill_dp_rank", 2**64 - 1), ("stop_token_ids", [2**64])])
def test_numbers_beyond_their_wire_type(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="expected (int|float) (<=|>=)") as error:
        decode_completion(json.dumps({"prompt": "hi", name: value}).encode())
    assert (error.value.param or "").startswith(name)


class Inner(msgspec.Struct):
    counts: dict[str, int | None]


class Body(msgspec.Struct):
    inner: list[Inner] | None = None
    fine: Int32 = 0
    ratio: float = 0.0


def test_a_body_must_bound_its_numbers() -> None:
    with pytest.raises(TypeError, match="Inner.counts, Body.ratio"):
        BodyDecoder(Body)


def test_sampling_defaults_and_values() -> None:
    request = decode_completion(b'{"prompt": "a", "stop": "x", "top_k": 0, "seed": 5, "min_tokens": 2}')
    params = sampling_params(request, None, 16, vocab_size=100)
    assert (params.max_new_tokens, params.stop, params.top_k) == (16, ("x",), -1)
    assert (params.seed, params.min_new_tokens) == (5, 2)
    assert not params.penalizes and params.logit_bias == {}


def test_penalties_and_bias_from_either_api() -> None:
    given = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"7": -100}}
    completion = decode_completion(json.dumps({"prompt": "a", **given}).encode())
    native = decode_generate(json.dumps({"text": "a", "sampling_params": given}).encode())
    for params in (sampling_params(completion, None, 16, vocab_size=100), native.samplings(1)[0].params(16, 100)):
        assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -1.0, 1.2)
        assert params.logit_bias == {7: -100.0} and params.penalizes
        assert decode_to_engine(encode_message(Generate("r", [1], params))).sampling == params


@pytest.mark.parametrize("body", [
    {}, {"text": "a", "input_ids": [1]}, {"text": []}, {"input_ids": [[]]}, {"input_ids": [1, [2]]},
    {"text": "a", "sampling_params": []}, {"text": "a", "rid": 5}, {"text": ["a", 1]},
    {"text": "a", "input_embeds": [[0.5]]},
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
    assert output_limit(100, 0, 100, tokens_name="max_tokens") == 0
    with pytest.raises(InvalidRequest, match="of 100 tokens leaves no room.*maximum context length is 100 tokens"):
        output_limit(100, None, 100, tokens_name="max_tokens")
    with pytest.raises(InvalidRequest, match="the model's maximum context length.*10 with max_tokens 91 are 101"):
        output_limit(10, 91, 100, tokens_name="max_tokens")


# ---------------------------------------------------------------- bootstrap fields


def test_rooms_of_choices_and_batches() -> None:
    one = BootstrapFields(bootstrap_host="h", bootstrap_port=9, bootstrap_room=100)
    assert bootstraps(one, 2, 2, 8998) == [Bootstrap("h", 9, room) for room in (100, 101, 102, 103)]
    many = BootstrapFields(bootstrap_host=["h", "g"], bootstrap_port=[9, None], bootstrap_room=[50, 70])
    assert bootstraps(many, 2, 2, 8998) == [
        Bootstrap("h", 9, 50), Bootstrap("h", 9, 51), Bootstrap("g", 8998, 70), Bootstrap("g", 8998, 71)]
    assert bootstraps(BootstrapFields(), 2, 1, 8998) == [None, None]
    each = BootstrapFields(bootstrap_host=["h"] * 3, bootstrap_port=[9] * 3, bootstrap_room=[50, 7, 60])
    assert bootstraps(each, 1, 3, 8998) == [Bootstrap("h", 9, 50), Bootstrap("h", 9, 7), Bootstrap("h", 9, 60)]


@pytest.mark.parametrize(("fields", "param"), [
    ({"bootstrap_host": "h"}, "bootstrap_room"), ({"bootstrap_room": 1}, "bootstrap_host"),
    ({"bootstrap_port": 1}, "bootstrap_port"),
    ({"bootstrap_host": "", "bootstrap_room": 1}, "bootstrap_host"),
    ({"bootstrap_host": "h", "bootstrap_room": -1}, "bootstrap_room"),
    ({"bootstrap_host": "h", "bootstrap_room": 2**63 - 1}, "bootstrap_room"),
    ({"bootstrap_host": "h", "bootstrap_room": 1, "bootstrap_port": 70000}, "bootstrap_port"),
    ({"bootstrap_host": ["h"], "bootstrap_room": [1, 2]}, "bootstrap_host"),
])
def test_bad_bootstrap_fields(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        bootstraps(msgspec.convert(fields, BootstrapFields), 2, 1, 8998)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank"])
def test_a_data_parallel_rank_must_be_there(name: str) -> None:
    assert requested_dp_rank(BootstrapFields(), 1) is None
    assert requested_dp_rank(BootstrapFields(**{name: 0}), 1) == 0
    assert requested_dp_rank(BootstrapFields(**{name: 3}), 4) == 3
    for rank, size, valid in ((1, 1, "0"), (-1, 1, "0"), (4, 4, "between 0 and 3")):
        with pytest.raises(InvalidRequest, match=f"^{name} must be {valid}, got {rank}: this server has") as error:
            requested_dp_rank(BootstrapFields(**{name: rank}), size)
        assert error.value.param == name


def test_the_prefill_servers_rank_travels_with_the_room() -> None:
    fields = BootstrapFields(bootstrap_host="h", bootstrap_room=4, disagg_prefill_dp_rank=2)
    assert [point.dp_rank for point in bootstraps(fields, 1, 2, 8998) if point] == [2, 2]
    fields.disagg_prefill_dp_rank = -1
    with pytest.raises(InvalidRequest, match="disagg_prefill_dp_rank must be 0 or more"):
        bootstraps(fields, 1, 1, 8998)


# ---------------------------------------------------------------- chat messages


@pytest.mark.parametrize("asked, thinks, effort", [
    ({}, None, None), ({"reasoning_effort": "low"}, True, "low"), ({"reasoning_effort": "none"}, False, "none"),
    ({"reasoning": {"effort": "none"}}, False, "none"), ({"reasoning": {"enabled": True}}, True, None),
    ({"reasoning": {"effort": "high"}, "chat_template_kwargs": {"enable_thinking": False}}, False, "high"),
    ({"reasoning": {"enabled": False}}, False, None)])
def test_how_much_a_chat_thinks(asked: dict[str, object], thinks: bool | None, effort: str | None) -> None:
    options = template_options(decode_chat(json.dumps({"messages": [], **asked}).encode()))
    assert options.get("enable_thinking") is thinks and options.get("reasoning_effort") == effort


def test_roles_are_read_as_sglang_does() -> None:
    request = decode_chat(b'{"messages": [{"role": "SYSTEM", "content": "x"}, {"role": "function", "content": "y"}]}')
    assert [message["role"] for message in template_messages(request)] == ["system", "tool"]


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
    assert native_lists([[], [(2, -0.25)]], piece) == [None, [(-0.25, 2, "é")]]
    prompt = completion_logprobs(Logprobs([1, 2], [None, -1.0], [[], [(1, -1.5)]]), piece, 0)
    assert (prompt.token_logprobs, prompt.top_logprobs) == ([None, -1.0], [None, {"a": -1.5}])


@pytest.mark.parametrize(("given", "want"), [
    (None, [(), ()]), ([], [(), ()]), ([3, 1], [(3, 1), (3, 1)]), ([[3], [1, 2]], [(3,), (1, 2)]),
    ([None, [9]], [(), (9,)])])
def test_listed_ids_of_each_prompt(given: object, want: object) -> None:
    request = decode_generate(json.dumps({"text": ["a", "b"], "token_ids_logprob": given}).encode())
    assert [options.token_ids for options in logprob_options(request, [4, 5], 10)] == want


@pytest.mark.parametrize("fields", [
    {"token_ids_logprob": [[1]]}, {"token_ids_logprob": [1, [2]]}, {"token_ids_logprob": [10]},
    {"token_ids_logprob": [1] * 1025}, {"token_ids_logprob": [1] * 1000, "logprob_start_len": 0},
    {"logprob_start_len": 5000}, {"top_logprobs_num": 21}])
def test_logprob_options_out_of_range(fields: dict[str, object]) -> None:
    request = decode_generate(json.dumps({"text": ["a", "b"], **fields}).encode())
    with pytest.raises(InvalidRequest) as error:
        logprob_options(request, [4, 2000], 10)
    assert error.value.param in fields
