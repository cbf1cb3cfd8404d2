"""Kimi K2: ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section."""

from __future__ import annotations

import re

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import json_arguments, json_object

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, SEP, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"[\w.\-:]*")


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    while opener := (yield from cursor.content(ALL_BEGIN, ALL_END, BEGIN)):
        yield from cursor.take(opener)
        if opener == BEGIN and not (yield from _call(cursor, calls)):
            cursor.to_content()
        else:
            cursor.drop()


def _call(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    yield from cursor.skip()
    name = (yield from cursor.run(_ID)).removeprefix("functions.").split(":")[0]
    yield from cursor.skip()
    if not name or not (yield from cursor.take(SEP)) or not (yield from json_object(cursor)):
        return False
    calls.begin(name)
    yield from json_arguments(cursor, calls, END, ALL_END)
    yield from cursor.skip()
    yield from cursor.take(END)
    return True


KIMI_K2 = ToolFormat(read, (ALL_BEGIN, ALL_END, BEGIN, SEP, END), (frozenset((ALL_BEGIN,)),), Layout(
    lambda name: Tag(f"{BEGIN}functions.{name}:0{SEP}", END), ALL_BEGIN, "", ALL_END, ALL_BEGIN))
