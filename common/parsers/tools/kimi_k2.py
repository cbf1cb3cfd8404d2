"""Kimi K2: ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section."""

from __future__ import annotations

import re

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import json_arguments, json_object, section_script
from .registry import TOOL_FORMATS

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, SEP, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"[\w.\-:]*")


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


_SCRIPT = section_script(ALL_BEGIN, ALL_END, BEGIN, _call)
KIMI_K2 = ToolFormat(_SCRIPT, (ALL_BEGIN, ALL_END, BEGIN, SEP, END), (frozenset((ALL_BEGIN,)),), Layout(
    lambda name: Tag(f"{BEGIN}functions.{name}:0{SEP}", END), ALL_BEGIN, "", ALL_END, ALL_BEGIN))
TOOL_FORMATS.register("kimi_k2")(KIMI_K2)
