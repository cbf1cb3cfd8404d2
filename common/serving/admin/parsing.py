"""``/parse_function_call`` and ``/separate_reasoning``: other servers' answers, parsed like this server's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from aiohttp import web

from ...api.errors import InvalidRequest
from ...parsers.answer_parts import Arguments, CallBegun, Part, Thought, joined
from ...parsers.reading import Reading
from ...parsers.reasoning import REASONING, begins_inside
from ...parsers.tools import FORMATS
from ..chat.tool_choice import ToolChoice, check_tools
from ..context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..protocol.requests import Tool
from ..web import json_response

_Format = TypeVar("_Format")


class _ParseRequest(msgspec.Struct):
    text: str
    tools: list[Tool]
    tool_call_parser: str | None = None


class _SeparateRequest(msgspec.Struct):
    text: str
    reasoning_parser: str | None = None


class _Call(msgspec.Struct):
    tool_index: int
    name: str
    parameters: str = ""


class _ParseAnswer(msgspec.Struct):
    normal_text: str
    calls: list[_Call]


class _SeparateAnswer(msgspec.Struct):
    reasoning_text: str
    text: str


_parse = BodyDecoder(_ParseRequest)
_separate = BodyDecoder(_SeparateRequest)


async def parse_function_call(context: ServingContext, request: web.Request) -> web.Response:
    body = _parse.decode(await request.read())
    check_tools(body.tools)
    formats = context.model.chat_formats
    tools = _format_named("tool_call_parser", body.tool_call_parser, FORMATS) or formats.tools
    if tools is None:
        raise InvalidRequest("tool_call_parser is missing, and this server has none of its own.",
                             param="tool_call_parser")
    parts = _read(Reading(tools, ToolChoice(tuple(body.tools)).schemas), body.text)
    calls: list[_Call] = []
    for part in parts:
        if isinstance(part, CallBegun):
            calls.append(_Call(len(calls), part.name))
        elif isinstance(part, Arguments):
            calls[-1].parameters += part.text
    return json_response(_ParseAnswer(_content(parts), calls))


async def separate_reasoning(context: ServingContext, request: web.Request) -> web.Response:
    body = _separate.decode(await request.read())
    formats = context.model.chat_formats
    reasoning = _format_named("reasoning_parser", body.reasoning_parser, REASONING) or formats.reasoning
    if reasoning is None:
        raise InvalidRequest("reasoning_parser is missing, and this server has none of its own.",
                             param="reasoning_parser")
    parts = _read(Reading(reasoning=reasoning, inside=begins_inside(reasoning, "")), body.text)
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return json_response(_SeparateAnswer(thoughts, _content(parts)))


def _format_named(param: str, name: str | None, formats: Mapping[str, _Format]) -> _Format | None:
    if name is not None and name not in formats:
        raise InvalidRequest(f"{param} must be one of {', '.join(sorted(formats))}, got {name[:80]!r}.", param=param)
    return None if name is None else formats[name]


def _read(reading: Reading, text: str) -> list[Part]:
    reader = reading.reader()
    return joined([*reader.push(text), *reader.finish()])


def _content(parts: list[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))
