"""/parse_function_call and /separate_reasoning, with SGLang's bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from baton.tests.helpers.fake_engine import make_checkpoint
from baton.tests.helpers.serving import Server, user

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(("parser", "text"), [
    (None, 'Hm. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
    ("mistral", 'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
])
async def test_parse_function_call(http: aiohttp.ClientSession, parser: str | None, text: str) -> None:
    status, answer = await post(http, "/parse_function_call", text=text, tools=TOOLS, tool_call_parser=parser)
    assert status == 200
    assert answer == {"normal_text": "Hm.", "calls": [{"tool_index": 0, "name": "f", "parameters": '{"a": 1}'}]}


async def test_separate_reasoning(http: aiohttp.ClientSession) -> None:
    for name, text in (("deepseek-r1", "Why?</think>So."), ("qwen3", "<think>\nWhy?\n</think>\n\nSo.")):
        assert await post(http, "/separate_reasoning", text=text, reasoning_parser=name) == (
            200, {"reasoning_text": "Why?", "text": "So."})


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/parse_function_call", {"text": "x", "tools": TOOLS, "tool_call_parser": "perl"}, "tool_call_parser"),
    ("/parse_function_call", {"text": "x", "tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
    ("/parse_function_call", {"text": "x"}, None), ("/separate_reasoning", {"text": "x"}, "reasoning_parser"),
    ("/separate_reasoning", {"text": "x", "reasoning_parser": "perl"}, "reasoning_parser"),
])
async def test_what_is_refused(http: aiohttp.ClientSession, path: str, body: dict[str, Any], param: str | None) -> None:
    status, answer = await post(http, path, **body)
    assert status == 400 and answer["error"]["param"] == param


# ---------------------------------------------------------------- markup that is special tokens


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose tokenizer has [TOOL_CALLS] and [THINK] as special tokens, which texts leave out by default."""
    from transformers import AutoTokenizer

    folder = make_checkpoint(tmp_path_factory.mktemp("special") / "special")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[THINK]", "[/THINK]"]})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config))
    server = Server(Path(folder) / "log", "--model-path", str(folder), "--served-model-name", "ours",
                    "--tool-call-parser", "mistral", "--reasoning-parser", "mistral")
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()


@pytest.fixture
def mistral(special: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=special.url + "/v1", api_key="none", max_retries=0)


async def test_markup_of_special_tokens_is_seen(mistral: openai.AsyncOpenAI) -> None:
    said = '[THINK]Hm é.[/THINK]Well. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'
    ask: Any = {"model": "ours", "messages": user(said), "tools": TOOLS}
    answer = await mistral.chat.completions.create(**ask)
    message = answer.choices[0].message
    assert message.content == "Well.f"  # behind the echoed call stands the tool's name, as the template prints it
    assert message.reasoning_content == "Hm é."  # type: ignore[attr-defined]
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or ()] == [  # type: ignore
        ("f", '{"a": 1}')]
    usage = answer.usage
    assert usage is not None and usage.completion_tokens_details is not None
    thought = usage.completion_tokens_details.reasoning_tokens
    assert thought is not None and 4 <= thought < usage.completion_tokens / 2
    thoughts, last = "", None
    stream = await mistral.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        last = chunk.usage or last
        for choice in chunk.choices:
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
    assert thoughts == "Hm é." and last is not None
    assert last.completion_tokens_details == usage.completion_tokens_details


async def test_the_served_name(mistral: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in mistral.models.list()] == ["ours"]
    with pytest.raises(openai.NotFoundError):
        await mistral.chat.completions.create(model="special", messages=user("x"))
