"""Tools, reasoning and their grammars as the openai client sees them: one server, and a router with a pair."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from baton.tests.helpers.harness import Cluster, Server
from baton.tests.helpers.ports import free_port

TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "sign": {"enum": ["+", "-"]}},
        "required": ["a", "sign"], "additionalProperties": False}}}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ADD = {"type": "function", "function": {"name": "add"}}
# tinychat reasons where its prompt makes it write "<think>" as the beginning of its answer.
THINK_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{{ begun or '' }}"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Router, prefill and decode server whose model's reasoning is told apart."""
    folder = tmp_path_factory.mktemp("pair")
    template = folder / "template.jinja"
    template.write_text(THINK_TEMPLATE)
    with Cluster(folder, flags=["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25", "--chat-template",
                                str(template)]) as cluster:
        yield cluster


@pytest.fixture(params=["unified", "relay"])
def client(request) -> openai.AsyncOpenAI:
    server = request.getfixturevalue(request.param)
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


async def streamed(client: openai.AsyncOpenAI, **ask: Any):
    """What a client makes of a stream, in the shape of a whole answer's choice."""
    text, thought, calls, reason = "", "", [], None
    async for chunk in await client.chat.completions.create(model="tinychat", stream=True, temperature=0, **ask):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls) and call.type == "function" and call.function.name
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return text or None, thought or None, [tuple(call) for call in calls], reason


async def whole(client: openai.AsyncOpenAI, **ask: Any):
    answer = await client.chat.completions.create(model="tinychat", temperature=0, **ask)
    message = answer.choices[0].message
    assert message.refusal is None and message.role == "assistant"
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    thought = getattr(message, "reasoning_content", None)
    return message.content or None, thought, calls, answer.choices[0].finish_reason


async def both(client: openai.AsyncOpenAI, **ask: Any):
    told = await whole(client, **ask)
    assert await streamed(client, **ask) == told
    return told


async def test_a_model_that_calls_by_itself(client: openai.AsyncOpenAI) -> None:
    text, _, calls, reason = await both(client, messages=WEATHER, tools=TOOLS[:1])
    assert (text, reason) == (None, "tool_calls") and [name for name, _ in calls] == ["weather"]
    assert set(json.loads(calls[0][1])) == {"city"}
    text, _, calls, reason = await both(client, messages=CAPITAL, tools=TOOLS)
    assert (text, calls, reason) == ("Paris", [], "stop")


async def test_a_model_that_must_call(client: openai.AsyncOpenAI) -> None:
    text, _, calls, reason = await both(client, messages=CAPITAL, tools=TOOLS, tool_choice="required",
                                        parallel_tool_calls=False)
    assert (text, reason, len(calls)) == (None, "tool_calls", 1)
    text, _, calls, reason = await both(client, messages=CAPITAL, tools=TOOLS, tool_choice=ADD)
    assert (text, reason) == (None, "tool_calls") and [name for name, _ in calls] == ["add"]
    arguments = json.loads(calls[0][1])
    assert set(arguments) == {"a", "sign"} and arguments["a"] <= 99 and arguments["sign"] in "+-"


async def test_an_answer_cut_off_within_a_call(client: openai.AsyncOpenAI) -> None:
    _, _, calls, reason = await both(client, messages=WEATHER, tools=TOOLS[:1], tool_choice="required", max_tokens=22)
    name, arguments = calls[0]
    assert (name, reason) == ("weather", "length") and arguments.startswith("{") and "}" not in arguments


async def test_an_agents_loop(client: openai.AsyncOpenAI) -> None:
    """The answer goes back into the conversation as the client has it."""
    answer = await client.chat.completions.create(model="tinychat", temperature=0, messages=WEATHER, tools=TOOLS[:1])
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"weather": "sunny"}'}
    text, _, _, reason = await both(client, messages=[*WEATHER, message.model_dump(exclude_none=True), result],
                                    tools=TOOLS[:1])
    assert text and reason == "stop"


@pytest.mark.parametrize(("fields", "param"), [
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "a": {"$ref": "#/nowhere"}}}}}], "tool_choice": "required"}, "tools"),
])
async def test_what_is_refused(client: openai.AsyncOpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(model="tinychat", messages=CAPITAL, **fields)
    assert error.value.param == param


# ---------------------------------------------------------------- reasoning


def reasoner(pair: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0)


async def test_reasoning_through_the_pair(pair: Cluster) -> None:
    client = reasoner(pair)
    inside = {"chat_template_kwargs": {"begun": "<think>\n"}}
    text, thought, _, reason = await both(client, messages=CAPITAL, max_tokens=12, extra_body=inside)
    assert text is None and thought and reason in ("stop", "length")
    text, thought, _, _ = await both(client, messages=CAPITAL)
    assert (text, thought) == ("Paris", None)
    text, thought, _, _ = await both(client, messages=CAPITAL, max_tokens=12,
                                     extra_body={**inside, "separate_reasoning": False})
    assert text and thought is None


async def test_reasoning_then_a_call(pair: Cluster) -> None:
    """The grammar lets the model reason, and demands a call behind that."""
    client = reasoner(pair)
    demand: Any = {"messages": CAPITAL, "tools": TOOLS, "tool_choice": ADD, "max_tokens": 60}
    done = "<think>\nHm.\n</think>\n\n"
    text, thought, calls, reason = await both(client, **demand, extra_body={"chat_template_kwargs": {"begun": done}})
    assert (text, thought, reason) == (None, None, "tool_calls")
    assert set(json.loads(calls[0][1])) == {"a", "sign"}
    answer = await client.chat.completions.create(
        model="tinychat", temperature=0, messages=CAPITAL, max_tokens=12,
        extra_body={"chat_template_kwargs": {"begun": "<think>\n"}})
    details = answer.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens >= answer.usage.completion_tokens - 1


async def events(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.post("/v1/chat/completions", json={**body, "stream": True},
                         headers={"X-Baton-Token-Ids": "1"}) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def told(found: list[dict[str, Any]]):
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return ("".join(delta.get("content") or "" for delta in deltas),
            "".join(delta.get("reasoning_content") or "" for delta in deltas),
            sum("role" in delta for delta in deltas),
            [(call["index"], call["function"]["name"]) for call in calls if "id" in call],
            "".join(call["function"]["arguments"] for call in calls), found[-1]["choices"][0]["finish_reason"])


@pytest.mark.parametrize("body", [
    {"messages": CAPITAL, "tools": TOOLS, "tool_choice": ADD, "max_tokens": 60,
     "chat_template_kwargs": {"begun": "<think>\n</think>\n"}},
    {"messages": CAPITAL, "max_tokens": 12, "chat_template_kwargs": {"begun": "<think>\n"}},
    {"messages": CAPITAL, "max_tokens": 12, "stream_reasoning": False, "chat_template_kwargs": {"begun": "<think>\n"}},
], ids=["call", "reasoning", "reasoning in one piece"])
async def test_another_server_goes_on_within_a_call_or_a_thought(pair: Cluster, body: dict[str, Any]) -> None:
    """Whole servers are asked, as the router does it after one of them died."""
    async with aiohttp.ClientSession(pair.decode[0].url) as http:
        body = {**body, "temperature": 0}
        found = await events(http, body)
        for cut in range(2, len(found) - 1):
            done = found[:cut]
            ids = [token for event in done for choice in event["choices"] for token in choice.get("token_ids", ())]
            if "token_ids" not in done[-1]["choices"][0]:
                continue  # within a piece that a server sends at once
            rest = await events(http, {**body, "continuation": {
                "token_ids": ids, "id": found[0]["id"], "created": found[0]["created"]}})
            assert told(done + rest) == told(found), cut


# ---------------------------------------------------------------- start


def test_a_missing_template_is_one_sentence(tmp_path) -> None:
    argv = ["server", "--model-path", "tinychat", "--device", "cpu", "--chat-template", "/nowhere.jinja"]
    server = Server("baton.launch", argv, free_port(), tmp_path / "log").start()
    try:
        assert server.process.wait(60) == 1
        errors = [line for line in server.log.read_text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert errors[0].startswith("error: Cannot read --chat-template /nowhere.jinja: No such file or directory")
    finally:
        if server.process.poll() is None:
            server.kill()
