"""DeepSeek V3 and R1-0528, and V3.1: calls between special tokens, arguments in a code block or bare.

V3:   ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` + a ``json`` code block + ``<｜tool▁call▁end｜>``
V3.1: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``
"""

from __future__ import annotations

import re

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import json_arguments, json_object, section_script
from .registry import TOOL_FORMATS

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
_NAME = re.compile(r"[\w.\-]*")
_MARKERS = (ALL_BEGIN, ALL_END, BEGIN, SEP, END)


def _call(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    yield from cursor.skip()
    name = yield from cursor.run(_NAME)
    if not name or not (yield from cursor.take(SEP)):
        return False
    if not (yield from json_object(cursor)):  # V3: the first word is the call's type
        name = yield from cursor.run(_NAME)
        yield from cursor.skip()
        if not name or not (yield from cursor.take(FENCE)):
            return False
        yield from cursor.take("json")
        if not (yield from json_object(cursor)):
            return False
    calls.begin(name)
    yield from json_arguments(cursor, calls, "\n" + FENCE, END, ALL_END)
    yield from cursor.skip()
    yield from cursor.take(FENCE)
    yield from cursor.skip()
    yield from cursor.take(END)
    return True


_SCRIPT = section_script(ALL_BEGIN, ALL_END, BEGIN, _call)
DEEPSEEK_V3 = ToolFormat(_SCRIPT, _MARKERS, (frozenset((BEGIN, SEP, FENCE + "json")),), Layout(
    lambda name: Tag(f"{BEGIN}function{SEP}{name}\n{FENCE}json\n", f"\n{FENCE}{END}"), ALL_BEGIN, "\n", ALL_END,
    ALL_BEGIN))
DEEPSEEK_V31 = ToolFormat(_SCRIPT, _MARKERS, (frozenset((BEGIN, SEP)),), Layout(
    lambda name: Tag(f"{BEGIN}{name}{SEP}", END), ALL_BEGIN, "", ALL_END, ALL_BEGIN), generality=1)
TOOL_FORMATS.register("deepseekv3")(DEEPSEEK_V3)
TOOL_FORMATS.register("deepseekv31")(DEEPSEEK_V31)
