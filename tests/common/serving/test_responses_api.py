"""``/v1/responses``, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from baton.tests.helpers.serving import wait_running

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]


async def test_a_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="hello wörld", metadata={"a": "b"}, store=False)
    assert (answer.output_text, answer.status, answer.object) == ("hello wörld", "completed", "response")
    assert answer.metadata == {"a": "b"} and answer.store is False  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.output_tokens == answer.usage.input_tokens + 1
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.output[0].type == "message" and answer.output[0].status == "completed"
    default = await client.responses.create(model="tiny", input="one two three", store=True, extra_body={
        "stop": "o th", "frequency_penalty": 0.5})
    assert default.output_text == "one tw" and default.store is True  # type: ignore[attr-defined]


async def test_all_kinds_of_input_become_one_prompt(client: openai.AsyncOpenAI) -> None:
    """The fake model says the prompt again, which is the contents of all messages."""
    answer = await client.responses.create(model="tiny", instructions="[be kind]", input=[
        {"role": "developer", "content": "[dev]"},
        {"role": "user", "content": [{"type": "input_text", "text": "[one]"}, {"type": "input_text", "text": "[two]"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "[said]", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "[out]"}])
    assert answer.output_text == "[be kind]\n\n[dev][one][two][said][out]"


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="tiny", input="hé €🙂 lo", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas >= 3 and kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed"]
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "hé €🙂 lo"
    assert last.response.usage is not None and last.response.usage.output_tokens > 3
    assert events[0].type == "response.created" and events[0].response.status == "in_progress"
    assert events[0].response.id == last.response.id
    assert events[2].type == "response.output_item.added" and events[2].item.content == []  # type: ignore[union-attr]


async def test_the_clients_own_accumulation(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input=CALL + CALL, tools=TOOLS) as stream:
        arguments = [event.arguments async for event in stream if event.type == "response.function_call_arguments.done"]
        final = await stream.get_final_response()
    assert [json.loads(text) for text in arguments] == [{"x": 1}] * 2
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"x": 1})] * 2
    assert {call.status for call in calls} == {"completed"}
    assert len({call.call_id for call in calls}) == 2
    async with client.responses.stream(model="tiny", input="hello world") as text_stream:
        pieces = [event.delta async for event in text_stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == "hello world"


async def test_calls_and_how_tools_are_chosen(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input=f"ok\n{CALL}", tools=TOOLS)
    # The echo ends with the name that the template prints for the offered tool.
    assert [item.type for item in answer.output] == ["message", "function_call", "message"] or (
        answer.output_text == "okf")
    call = next(item for item in answer.output if item.type == "function_call")
    assert call.name == "f" and json.loads(call.arguments) == {"x": 1} and call.call_id
    declined = await client.responses.create(model="tiny", input=CALL, tools=TOOLS, tool_choice="none")
    assert declined.output_text == CALL
    more = [*TOOLS, {"type": "function", "name": "gg", "parameters": {}, "strict": None}]
    allowed = await client.responses.create(model="tiny", input="x", tools=more, tool_choice={
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "gg"}]})
    assert allowed.output_text == "x gg"  # only that one is shown to the model


async def test_cut_short(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="the quick brown fox", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    stream = await client.responses.create(model="tiny", input="the quick brown fox", max_output_tokens=2, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.incomplete" and last.response.status == "incomplete"


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    ask: Any = {"model": "tiny", "input": "hello world", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = await client.responses.create(**ask)
    found = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert "".join(token.token for token in found) == "hello world" and len(found[0].top_logprobs) == 1
    events = [event async for event in await client.responses.create(**ask, stream=True)]
    told = [token.token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert "".join(told) == "hello world"


async def test_failures(client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    """Before the first event a failure has a status; behind it, it is the stream's last event."""
    fails: Any = {"model": "tiny", "input": "hello world fox", "temperature": 0.5}
    for stream in (False, True):
        async with http.post("/v1/responses", json=fails | {"stream": stream, "rid": "r" * 300}) as answer:
            assert answer.status == 400
    async with http.post("/v1/responses", json=fails | {"stream": True, "rid": "cut", "input": "fox " * 150}) as answer:
        assert answer.status == 200
        await answer.content.readany()
        async with http.post("/abort_request", json={"rid": "cut"}) as aborted:
            assert aborted.status == 200
        lines = (await answer.content.read()).split(b"\n\n")
    last = json.loads(lines[-2].split(b"data: ", 1)[1])
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error" and last["response"]["error"]["message"].endswith(".")
    await wait_running(http, 0)


@pytest.mark.parametrize("body, param", [
    ({"input": []}, "input"), ({"input": 3}, "input"), ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "background": True, "store": False}, "background"),
    ({"input": "x", "max_tool_calls": 0}, "max_tool_calls"), ({"input": "x", "conversation": "c"}, "conversation"),
    ({"input": "x", "tools": [{"type": "mcp"}]}, "tools[0].server_label"),
    ({"input": "x", "tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].server_label"),
    ({"input": "x", "tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]}, "tools[0].server_url"),
    ({"input": "x", "tools": [{"type": "mcp", "server_label": "x", "require_approval": "always"}]},
     "tools[0].require_approval"), ({"input": "x", "tools": [{"type": "file_search"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"content": "x"}]}, "input[0].role"), ({"input": [{"type": "function_call"}]}, "input[0].call_id"),
    ({"input": "x", "max_output_tokens": -1}, "max_output_tokens"), ({"input": "x", "temperature": -1}, "temperature"),
    ({"input": "x", "max_output_tokens": 10**9}, "max_output_tokens"),
    ({"input": "x", "top_logprobs": 99}, "top_logprobs"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format")])
async def test_refusals(http: aiohttp.ClientSession, body: dict[str, Any], param: str) -> None:
    async with http.post("/v1/responses", json=body) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 400 and error["param"] == param and error["message"].endswith(".")
    assert "messages" not in error["message"] and "max_completion_tokens" not in error["message"]
