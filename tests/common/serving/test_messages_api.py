"""``/v1/messages``, with Anthropic's client."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import pytest

from baton.tests.helpers.serving import Server, wait_running

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS: Any = [{"name": "f", "description": "does", "input_schema": {"type": "object"}}]


@pytest.fixture
def claude(server: Server) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0)


def ask(text: Any, **extra: Any) -> Any:
    return {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": text}]} | extra


async def test_a_text(claude: anthropic.AsyncAnthropic) -> None:
    answer = await claude.messages.create(**ask("hello wörld"))
    assert answer.content[0].type == "text" and answer.content[0].text == "hello wörld"
    assert (answer.role, answer.type, answer.stop_reason, answer.stop_sequence) == (
        "assistant", "message", "end_turn", None)
    usage = answer.usage
    assert usage.cache_read_input_tokens == 1
    assert usage.output_tokens == usage.input_tokens + 2  # the echo and its end; one input token was cached


async def test_all_blocks_become_one_prompt(claude: anthropic.AsyncAnthropic) -> None:
    """The fake model says the prompt again, which is the contents of all messages."""
    answer = await claude.messages.create(model="tiny", max_tokens=300, system=[
        {"type": "text", "text": "[a]"}, {"type": "text", "text": "[b]", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "[one]"}, {"type": "text", "text": "[two]"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "[said]"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "[out]"}]},
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "[bad]"},
                {"type": "text", "text": "[then]"}]}])
    assert answer.content[0].text == "[a]\n[b][one][two][said][out][bad][then]"  # type: ignore[union-attr]


async def test_stops(claude: anthropic.AsyncAnthropic) -> None:
    for stream in (False, True):
        for extra, reason, sequence, text in (
                ({"stop_sequences": ["ee zeb"]}, "stop_sequence", "ee zeb", "one two thr"),
                ({"max_tokens": 1}, "max_tokens", None, "o"), ({}, "end_turn", None, "one two three zebra")):
            body = ask("one two three zebra") | extra
            if stream:
                async with claude.messages.stream(**body) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await claude.messages.create(**body)
            assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == (reason, sequence, text)


async def test_a_stream(claude: anthropic.AsyncAnthropic) -> None:
    events = [event async for event in await claude.messages.create(**ask("hé €🙂 lo"), stream=True)]
    deltas = sum(event.type == "content_block_delta" for event in events)
    assert deltas >= 3 and [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop"]
    start, last = events[0], events[-2]
    assert start.type == "message_start" and start.message.content == [] and start.message.usage.input_tokens > 3
    assert last.type == "message_delta" and last.usage.output_tokens > 3 and last.delta.stop_reason == "end_turn"
    assert last.usage.input_tokens == start.message.usage.input_tokens - 1 and last.usage.cache_read_input_tokens == 1
    async with claude.messages.stream(**ask("hé €🙂 lo")) as stream:
        assert "".join([text async for text in stream.text_stream]) == "hé €🙂 lo"


async def test_tools(claude: anthropic.AsyncAnthropic) -> None:
    body = ask(CALL * 2, tools=TOOLS)
    whole = await claude.messages.create(**body)
    async with claude.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert [(use.name, use.input) for use in uses] == [("f", {"x": 1})] * 2 and uses[0].id != uses[1].id
        assert answer.stop_reason == "tool_use"
    declined = await claude.messages.create(**ask(CALL, tools=TOOLS, tool_choice={"type": "none"}))
    assert declined.content[0].text == CALL  # type: ignore[union-attr]
    one = await claude.messages.create(**body, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert sum(block.type == "tool_use" for block in one.content) == 1


async def test_counting(claude: anthropic.AsyncAnthropic) -> None:
    body = ask("hello world fox", tools=TOOLS, system="be kind")
    del body["max_tokens"]
    counted = await claude.messages.count_tokens(**body)
    answer = await claude.messages.create(**body, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


async def test_errors_are_anthropics(claude: anthropic.AsyncAnthropic, http: aiohttp.ClientSession,
                                     server: Server) -> None:
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        await claude.with_options(api_key="wrong").messages.create(**ask("x"))
    assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(**ask("x") | {"model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    async with http.get("/v1/messages") as answer:
        assert answer.status == 405 and (await answer.json())["type"] == "error"
    async with http.post("/v1/messages", data=b"{") as answer:
        assert answer.status == 400 and (await answer.json())["error"]["type"] == "invalid_request_error"
    async with (aiohttp.ClientSession(server.url, headers={"x-api-key": "secret"}) as other,
                other.get("/v1/models") as answer):
        assert answer.status == 200


async def test_a_stream_that_fails_later(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/messages", json=ask("fox " * 150, stream=True, rid="cut")) as answer:
        assert answer.status == 200
        await answer.content.readany()
        async with http.post("/abort_request", json={"rid": "cut"}) as aborted:
            assert aborted.status == 200
        rest = await answer.content.read()
    kind, data = rest.removesuffix(b"\n\n").split(b"\n")[-2:]
    assert kind == b"event: error" and data.startswith(b'data: {"type":"error","error":{"type":"api_error"')
    await wait_running(http, 0)


@pytest.mark.parametrize("wrong, param", [
    ({"messages": []}, "messages"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**9}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"), ({"temperature": -1}, "temperature"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
     "messages[0].content[0].id"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "often"}}, "tool_choice.type"), ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format")])
async def test_refusals(http: aiohttp.ClientSession, wrong: dict[str, Any], param: str) -> None:
    async with http.post("/v1/messages", json=ask("x") | wrong) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 400 and error["param"] == param and error["message"].endswith(".")
