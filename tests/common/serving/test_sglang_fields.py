"""Fields of SGLang's and other servers that change answers."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from baton.common.serving.chat.prompt import template_options
from baton.common.serving.chat.schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    decode_chat,
)
from baton.common.serving.embeddings.handler import _probabilities
from baton.common.serving.messages.formatter import MessageFormatter
from baton.common.serving.messages.schema import decode_messages
from baton.common.serving.protocol.answer_metadata import AnswerMetadata
from baton.common.serving.protocol.continuation import ResponseHeader
from baton.common.serving.protocol.usage import Usage

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        told: dict[str, Any] = await answer.json()
        return told


async def chunks(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.post(path, json={**body, "stream": True}) as answer:
        lines = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_each_request_has_its_stream_interval(http: aiohttp.ClientSession) -> None:
    asks = {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0}
    body = {"text": ["hello", "world"], "sampling_params": [{**asks, "stream_interval": 4}, asks]}
    counts: list[list[int]] = [[], []]
    for event in await chunks(http, "/generate", body):
        counts[event["index"]].append(len(event["output_ids"]))
    assert counts == [[1, 5, 9], [*range(1, 10)]]


async def test_loads_are_reported(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/loads") as answer:
        found = await answer.json()
    [rank] = found["loads"]
    assert found["dp_rank_count"] == 1 and rank["num_total_reqs"] == rank["num_running_reqs"] == 0
    assert rank["max_total_num_tokens"] > 0 and 0 <= rank["token_usage"] <= 1
    assert found["aggregate"] == {"total_running_reqs": 0, "total_waiting_reqs": 0, "total_reqs": 0,
                                  "avg_token_usage": rank["token_usage"]}


async def test_token_ids_of_answers(http: aiohttp.ClientSession) -> None:
    """/generate has them always, under the name output_ids."""
    prompt = (await post(http, "/tokenize", {"prompt": "hello world"}))["tokens"]
    native = await post(http, "/generate", {"text": "hello world", "return_prompt_token_ids": True})
    assert native["prompt_token_ids"] == prompt
    assert "prompt_token_ids" not in await post(http, "/generate", {"text": "hello world"})
    events = await chunks(http, "/generate", {"text": "hello world", "return_prompt_token_ids": True})
    assert [event.get("prompt_token_ids") for event in events] == [None] * (len(events) - 1) + [prompt]
    asks = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    for path, body, name in (("/v1/completions", {"prompt": ["hello world", "fox"]}, "token_ids"),
                             ("/v1/chat/completions", CHAT, "response_token_ids")):
        plain = (await post(http, path, {**body, **asks}))["choices"]
        assert not any("token_ids" in field for choice in plain for field in choice)
        choices = (await post(http, path, {**body, **asks, "return_token_ids": True}))["choices"]
        assert all(len(choice[name]) == 5 for choice in choices)
        if path == "/v1/completions":
            assert choices[0]["prompt_token_ids"] == prompt
        streamed: dict[int, list[int]] = {}
        first: dict[int, list[int]] = {}
        for event in await chunks(http, path, {**body, **asks, "return_token_ids": True}):
            for choice in event["choices"]:
                streamed.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
                if "prompt_token_ids" in choice:
                    assert choice["index"] not in first
                    first[choice["index"]] = choice["prompt_token_ids"]
        assert streamed == {choice["index"]: choice[name] for choice in choices}
        assert first == {choice["index"]: choice["prompt_token_ids"] for choice in choices}
    asks = {**CHAT, **asks, "return_prompt_token_ids": True}
    only_prompt = (await post(http, "/v1/chat/completions", asks))["choices"]
    assert only_prompt[0]["prompt_token_ids"] == choices[0]["prompt_token_ids"]
    assert "response_token_ids" not in only_prompt[0]


@pytest.mark.parametrize("fields, options", [
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled"}),
    ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled"}),
    ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"thinking": False}},
     {"enable_thinking": True, "thinking": False, "thinking_mode": "adaptive"}), ({}, {})])
def test_thinking_reaches_the_template(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert template_options(decode_chat(json.dumps({**CHAT, **fields}).encode())) == options


def test_a_prefix_continues_the_last_message() -> None:
    def decoded(*messages: dict[str, Any]) -> ChatRequest:
        return decode_chat(json.dumps({"messages": [{"role": "user", "content": "a"}, *messages]}).encode())

    assert decoded({"role": "assistant", "content": "b", "prefix": True}).continue_final_message
    assert not decoded({"role": "assistant", "content": "b", "prefix": False}).continue_final_message
    assert not decoded({"role": "assistant", "content": "b", "prefix": True},
                       {"role": "user", "content": "c"}).continue_final_message


@pytest.mark.parametrize("display, seen", [("omitted", ""), ("summarized", "because"), (None, "because")])
def test_thinking_is_omitted_on_demand(display: str | None, seen: str) -> None:
    body = decode_messages(json.dumps({**CHAT, "max_tokens": 9, "thinking": {
        "type": "enabled", "budget_tokens": 5, "display": display}}).encode())
    header, usage = ResponseHeader("msg_1", 0, "m"), Usage.of(1, None, 2)
    choice = ChatChoice(0, ChatMessage("Paris", reasoning_content="because"), None, "stop")
    whole = MessageFormatter(body, header, 1).full(choice, ChatCompletion(
        "c", 0, "m", [choice], usage, AnswerMetadata("v")))
    assert [(block.type, getattr(block, block.type)) for block in whole.content] == [
        ("thinking", seen), ("text", "Paris")]
    formatter = MessageFormatter(body, header, 1)
    events = b"".join(formatter.start())
    for delta in (ChatDelta(reasoning_content="because"), ChatDelta(content="Paris")):
        events += b"".join(formatter.delta(ChatChunk("c", 0, "m", [ChatChunkChoice(0, delta)])))
    events += b"".join(formatter.finish())
    told = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]
    assert "".join(one["delta"].get("thinking", "") for one in told if one["type"] == "content_block_delta") == seen
    starts = [one["content_block"]["type"] for one in told if one["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]


async def test_scores_at_no_temperature(http: aiohttp.ClientSession) -> None:
    body = {"query": "hello", "items": ["world", "fox"], "label_token_ids": [3, 4]}
    for temperature in (0, -1):
        async with http.post("/v1/score", json={**body, "temperature": temperature}) as answer:
            assert answer.status == 400 and "temperature must be above 0" in await answer.text()


def test_probabilities_of_labels_at_a_temperature() -> None:
    assert _probabilities([-1.0, -2.0], True, 0.5) == pytest.approx([0.8807970779778824, 0.11920292202211755])
    assert _probabilities([-1.0, -2.0], True) == pytest.approx([0.7310585786300049, 0.2689414213699951])
    assert _probabilities([-1.0], False, 0.5) == pytest.approx([0.36787944117144233])
    assert _probabilities([-float("inf")] * 2, True) == [0.0, 0.0]


async def test_errors_have_sglangs_fields_beside_openais(http: aiohttp.ClientSession) -> None:
    for path, status, kind in (("/generate", 400, "BadRequestError"), ("/v1/chat/completions", 400, "BadRequestError"),
                               ("/v1/score", 400, "BadRequestError"), ("/nothing", 404, "NotFoundError")):
        async with http.post(path, json={}) as answer:
            told = await answer.json()
        assert (answer.status, told["object"], told["code"], told["type"]) == (status, "error", status, kind)
        assert told["message"] == told["error"]["message"] and told["error"]["code"] != status
