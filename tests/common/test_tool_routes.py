"""/parse_function_call and /separate_reasoning, with SGLang's bodies."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

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
