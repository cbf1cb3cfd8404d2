"""The APIs as their clients use them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from baton.tests.helpers.fake_engine import EOS
from baton.tests.helpers.serving import generate, user, wait_running

# ---------------------------------------------------------------- OpenAI's client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=user("hello world é"))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello world é", "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == answer.usage.prompt_tokens + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.object == "chat.completion" and answer.model == "tiny"


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=user("hé €🙂 lo"), stream=True, n=2,
                                                  stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * (chunks[-1].usage.prompt_tokens + 1)
    assert len({chunk.id for chunk in chunks}) == 1
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert all(choice.delta.role is None for choice in mine[1:])
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        pieces = [choice.delta.content or "" for choice in mine]
        assert "".join(pieces) == "hé €🙂 lo" and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


async def test_stop_strings_across_tokens(client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": user("one two three zebra five"), "stop": ["ee zeb", "nothing"]}
    answer = await client.chat.completions.create(**ask)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two thr", "stop")
    stream = await client.chat.completions.create(**ask, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two thr"
    answer = await client.chat.completions.create(**ask, extra_body={"no_stop_trim": True})
    assert answer.choices[0].message.content == "one two three zeb"
    await wait_running(http, 0)


async def test_stop_expressions(client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
    expression = "t[a-z]+e.zeb"
    ask: dict[str, Any] = {"model": "tiny", "messages": user("one two three zebra"), "extra_body": {
        "stop_regex": ["never", expression]}}
    answer = await client.chat.completions.create(**ask)
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].matched_stop == expression  # type: ignore[attr-defined]
    stream = await client.chat.completions.create(**ask, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two "
    status, native = await generate(http, text="one two three zebra", sampling_params={
        "stop_regex": expression, "no_stop_trim": True, "max_new_tokens": 50})
    assert status == 200 and native["text"] == "one two three zeb"
    assert native["meta_info"]["finish_reason"] == {"type": "stop", "matched": expression}
    with pytest.raises(openai.BadRequestError, match="is no regular expression"):
        await client.completions.create(model="tiny", prompt="x", extra_body={"stop_regex": "(["})
    await wait_running(http, 0)


async def test_length_and_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=user("hello world"), max_completion_tokens=2,
                                                  logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2]
    stream = await client.chat.completions.create(model="tiny", messages=user("hello world"), logprobs=True,
                                                  stream=True)
    tokens = [token.token async for chunk in stream if chunk.choices[0].logprobs
              for token in chunk.choices[0].logprobs.content or []]
    assert "".join(tokens) == "hello world"


async def test_tool_calls(client: openai.AsyncOpenAI) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    # The echo ends with the name that the template prints for the offered tool.
    answer = await client.chat.completions.create(model="tiny", messages=user(f"ok\n{call}"), tools=tools)
    message = answer.choices[0].message
    assert message.content == "okf" and message.tool_calls is not None
    assert message.tool_calls[0].function.name == "f"  # type: ignore[union-attr]
    assert json.loads(message.tool_calls[0].function.arguments) == {"x": 1}  # type: ignore[union-attr]
    assert answer.choices[0].finish_reason == "tool_calls"
    stream = await client.chat.completions.create(model="tiny", messages=user(call * 2), tools=tools, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    begun = [call for call in calls if call.function and call.function.name]
    assert [(call.index, call.function and call.function.name) for call in begun] == [(0, "f"), (1, "f")]
    assert all(call.id and call.type == "function" for call in begun) and len({call.id for call in begun}) == 2
    pieces = [call.function.arguments for call in calls if call.index == 1 and call.function]
    assert "".join(piece or "" for piece in pieces) == '{"x": 1}' and len(pieces) > 2
    assert choices[-1].finish_reason == "tool_calls"
    declined = await client.chat.completions.create(model="tiny", messages=user(call), tools=tools, tool_choice="none")
    assert declined.choices[0].message.content == call and declined.choices[0].finish_reason == "stop"


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="default", prompt=["hello", "the quick brown fox"], max_tokens=50,
                                             n=2)
    assert [choice.text for choice in answer.choices] == ["hello"] * 2 + ["the quick brown fox"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = await client.completions.create(model="tiny", prompt=[[50, 51], [52]], max_tokens=2, logprobs=1)
    assert [choice.finish_reason for choice in ids.choices] == ["length", "stop"]
    found = ids.choices[0].logprobs
    assert found is not None and found.text_offset == [0, 1] and found.token_logprobs == [-0.5, -0.5]
    assert "".join(found.tokens or []) == ids.choices[0].text
    default = await client.completions.create(model="tiny", prompt="x" * 40)
    assert default.usage is not None and default.usage.completion_tokens == 16


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "hello"}),
                                            ("/v1/chat/completions", {"messages": user("hello")})])
async def test_details_of_cached_tokens(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    found = {"cached_tokens_details": {"device": 1, "host": 0}}
    async with http.post(path, json=body) as answer:
        assert "sglext" not in await answer.json()
    async with http.post(path, json=body | {"return_cached_tokens_details": True}) as answer:
        assert (await answer.json())["sglext"] == found
    async with http.post(path, json=body | {"return_cached_tokens_details": True, "stream": True}) as answer:
        events = [json.loads(line[6:]) for line in (await answer.text()).splitlines() if line.startswith("data: {")]
    assert (events[-1]["sglext"], events[-1]["choices"]) == (found, [])
    assert not any("sglext" in event for event in events[:-1])


async def test_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="tiny", prompt="hello wörld", max_tokens=50, stream=True,
                                             logprobs=0, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == "hello wörld"
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset or []]
    assert offsets[0] == 0 and offsets == sorted(set(offsets))
    assert choices[-1].finish_reason == "stop" and choices[-1].matched_stop == EOS  # type: ignore[attr-defined]
    assert choices[-1].logprobs is None, "no tokens, so that nobody looks for a first one"


async def test_usage_in_every_chunk(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "stream": True, "n": 2, "stream_options": {"continuous_usage_stats": True}}
    for stream in (await client.chat.completions.create(messages=user("one two three"), **options),
                   await client.completions.create(prompt="one two three", max_tokens=50, **options)):
        counts: dict[int, list[int]] = {0: [], 1: []}
        async for chunk in stream:
            assert chunk.usage is not None and chunk.usage.prompt_tokens > 0
            counts[chunk.choices[0].index].append(chunk.usage.completion_tokens)
        for mine in counts.values():
            assert mine == sorted(mine) and mine[-1] == chunk.usage.prompt_tokens + 1, mine


async def test_models_and_errors(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert models[0].id.endswith("/tiny")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-5", messages=user("hi"))
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


# ---------------------------------------------------------------- /generate


async def test_generate(http: aiohttp.ClientSession) -> None:
    status, answer = await generate(http, text="hello world", rid="mine", return_logprob=True, logprob_start_len=0,
                                    top_logprobs_num=1, return_text_in_logprobs=True)
    meta = answer["meta_info"]
    assert status == 200 and answer["text"] == "hello world" and answer["output_ids"][-1] == EOS
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert meta["completion_tokens"] == meta["prompt_tokens"] + 1 and meta["cached_tokens"] == 1
    assert meta["cached_tokens_details"] == {"device": 1, "host": 0}
    assert meta["output_token_logprobs"][0] == [-0.5, answer["output_ids"][0], "hello"]
    assert meta["input_token_logprobs"][0][0] is None and len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert len(meta["output_top_logprobs"]) == meta["completion_tokens"] and meta["e2e_latency"] > 0


async def test_generate_batches(http: aiohttp.ClientSession) -> None:
    _, answers = await generate(http, input_ids=[[50, 51], [52]], sampling_params=[
        {"max_new_tokens": 1}, {"max_new_tokens": 3, "ignore_eos": True}])
    assert [answer["output_ids"] for answer in answers] == [[50], [52, 52, 52]]
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    _, answers = await generate(http, text="hello", sampling_params={"n": 3}, rid="r")
    assert [answer["meta_info"]["id"] for answer in answers] == ["r-0", "r-1", "r-2"]


async def test_generate_streams_cumulative_text(http: aiohttp.ClientSession) -> None:
    async with http.post("/generate", json={"text": ["hello world", "fox"], "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        lines = [line async for line in answer.content if line.strip()]
    assert lines[-1] == b"data: [DONE]\n"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    for index, text in enumerate(("hello world", "fox")):
        texts = [event["text"] for event in events if event["index"] == index]
        assert texts[-1] == text and all(text.startswith(part) for part in texts)
