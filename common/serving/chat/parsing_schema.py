"""Requests and answers of ``/parse_function_call`` and ``/separate_reasoning``."""

from __future__ import annotations

import msgspec

from .schema import Tool


class ParseRequest(msgspec.Struct):
    text: str
    tools: list[Tool]
    tool_call_parser: str | None = None


class SeparateRequest(msgspec.Struct):
    text: str
    reasoning_parser: str | None = None


class ParsedCall(msgspec.Struct):
    tool_index: int
    name: str
    parameters: str = ""


class ParseAnswer(msgspec.Struct):
    normal_text: str
    calls: list[ParsedCall]


class SeparateAnswer(msgspec.Struct):
    reasoning_text: str
    text: str
