"""``/parse_function_call`` and ``/separate_reasoning``: other servers' answers, parsed like this server's."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web

from ...api.errors import InvalidRequest
from ...parsers.output_format import OutputFormat
from ...parsers.output_parser import OutputDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart, joined
from ...parsers.reasoning import REASONING_FORMATS, begins_inside
from ...parsers.tools import TOOL_FORMATS
from ...registry import Registry
from ..context.serving_context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..web import json_response
from .parsing_schema import ParseAnswer, ParsedCall, ParseRequest, SeparateAnswer, SeparateRequest
from .tool_choice import ToolChoice, check_tools

_Format = TypeVar("_Format")
_parse = BodyDecoder(ParseRequest)
_separate = BodyDecoder(SeparateRequest)


async def parse_function_call(context: ServingContext, request: web.Request) -> web.Response:
    body = _parse.decode(await request.read())
    check_tools(body.tools)
    formats = context.model.chat_formats
    tools = _format_named("tool_call_parser", body.tool_call_parser, TOOL_FORMATS) or formats.tools
    if tools is None:
        raise InvalidRequest("tool_call_parser is missing, and this server has none of its own.",
                             param="tool_call_parser")
    parts = _read(OutputFormat(tools, ToolChoice(tuple(body.tools)).schemas), body.text)
    calls: list[ParsedCall] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            calls.append(ParsedCall(len(calls), part.name))
        elif isinstance(part, ToolArgumentsDelta):
            calls[-1].parameters += part.text
    return json_response(ParseAnswer(_content(parts), calls))


async def separate_reasoning(context: ServingContext, request: web.Request) -> web.Response:
    body = _separate.decode(await request.read())
    formats = context.model.chat_formats
    reasoning = _format_named("reasoning_parser", body.reasoning_parser, REASONING_FORMATS) or formats.reasoning
    if reasoning is None:
        raise InvalidRequest("reasoning_parser is missing, and this server has none of its own.",
                             param="reasoning_parser")
    parts = _read(OutputFormat(reasoning=reasoning, inside=begins_inside(reasoning, "")), body.text)
    thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
    return json_response(SeparateAnswer(thoughts, _content(parts)))


def _format_named(param: str, name: str | None, formats: Registry[_Format]) -> _Format | None:
    if name is not None and name not in formats:
        raise InvalidRequest(f"{param} must be one of {', '.join(formats)}, got {name[:80]!r}.", param=param)
    return None if name is None else formats.get(name)


def _read(output_format: OutputFormat, text: str) -> list[OutputDelta]:
    parser = output_format.new_parser()
    return joined([*parser.push(text), *parser.finish()])


def _content(parts: list[OutputDelta]) -> str:
    return "".join(part for part in parts if isinstance(part, str))
