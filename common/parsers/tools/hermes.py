"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen 2.5 and 3 write it."""

from __future__ import annotations

import json

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import envelope
from .registry import TOOL_FORMATS

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    while (yield from cursor.content(OPEN)):
        yield from cursor.take(OPEN)
        if not (yield from envelope(cursor, calls, CLOSE)):
            cursor.to_content()
            continue
        yield from cursor.skip(" \t\r\n}")  # models close more brackets than they opened
        yield from cursor.take(CLOSE)
        cursor.drop()


HERMES = ToolFormat(read, (OPEN, CLOSE), (frozenset((OPEN, "arguments")),), Layout(
    lambda name: Tag(f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{CLOSE}"), between="\n",
    trigger=OPEN), generality=2)
TOOL_FORMATS.register("qwen25", "qwen", "hermes")(HERMES)
