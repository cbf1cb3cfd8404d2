"""Tool calls in a model's answer, found while it streams."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, Protocol


class ToolCall(NamedTuple):
    """``arguments`` is a JSON object in a string."""

    name: str
    arguments: str


Part = str | ToolCall
"""A piece of content, or one complete call."""


class ToolCallParser(Protocol):
    """Takes the answer's text in pieces; the parts that come out do not depend on how it was cut."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What is left; a call that is not complete is content."""


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it.

    White space beside a call belongs to the markup and is dropped. Markup that holds no such object is content.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""
        self._after_call = False
        self._searched = 0  # of an open call: characters that hold no end of it

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        if self._after_call:
            rest = rest.lstrip()
        return [rest] if rest else []

    def _advance(self, parts: list[Part]) -> bool:
        """Move one part from the text to ``parts``; False where more text is needed for that."""
        if self._text.startswith(self.OPEN):
            end = self._text.find(self.CLOSE, max(len(self.OPEN), self._searched))
            if end < 0:
                self._searched = max(0, len(self._text) - len(self.CLOSE))
                return False
            self._searched = 0
            markup, self._text = self._text[: end + len(self.CLOSE)], self._text[end + len(self.CLOSE):]
            call = parse_call(markup[len(self.OPEN): -len(self.CLOSE)])
            self._after_call = call is not None
            parts.append(call or markup)
            return True
        if self._after_call:
            self._text = self._text.lstrip()
        end = self._text.find(self.OPEN)
        content = self._text[:end].rstrip() if end >= 0 else self._certain()
        self._text = self._text[end:] if end >= 0 else self._text[len(content):]
        if content:
            parts.append(content)
            self._after_call = False
        return end >= 0

    def _certain(self) -> str:
        """The text without an end that may be white space before a call, or the beginning of one."""
        text = self._text
        start = text.rfind("<")
        if start >= 0 and self.OPEN.startswith(text[start:]):
            text = text[:start]
        return text.rstrip()


def parse_call(text: str) -> ToolCall | None:
    """The call that a JSON object describes, None where it describes none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(call["name"], arguments) if re.match(r"\s*\{", arguments) else None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))
