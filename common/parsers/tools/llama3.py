"""Llama 3.1 to 3.3: ``<|python_tag|>{"name": ..., "parameters": {...}}``, or the object alone; ``;`` between calls.

An object without the tag is a call only where it begins the answer and names an offered tool: an answer may be JSON.
"""

from __future__ import annotations

import json

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import envelope, json_object
from .registry import TOOL_FORMATS

TAG = "<|python_tag|>"


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    if (yield from json_object(cursor)):
        yield from _row(cursor, calls, any_name=False)
    else:
        cursor.to_content()
    while (yield from cursor.content(TAG)):
        yield from cursor.take(TAG)
        yield from _row(cursor, calls, any_name=True)


def _row(cursor: Cursor, calls: CallEmitter, *, any_name: bool) -> Step[None]:
    while (yield from envelope(cursor, calls, ";", TAG, any_name=any_name)):
        cursor.drop()
        yield from cursor.skip(" \t\r\n;}")
        cursor.drop()
        if cursor.next != "{":
            return
    cursor.to_content()


LLAMA3 = ToolFormat(read, (TAG,), (frozenset((TAG,)), frozenset(('{"name": function name, "parameters"',))), Layout(
    lambda name: Tag(f'{{"name": {json.dumps(name)}, "parameters": ', "}"), between="; "), generality=4)
TOOL_FORMATS.register("llama3")(LLAMA3)
