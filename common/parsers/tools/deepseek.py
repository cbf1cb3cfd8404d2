"""DeepSeek V3 and R1-0528, and V3.1: calls between special tokens, arguments in a code block or bare.

V3:   ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` + a ``json`` code block + ``<｜tool▁call▁end｜>``
V3.1: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``
"""

from __future__ import annotations

import re

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import json_arguments, json_object

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
_NAME = re.compile(r"[\w.\-]*")
_MARKERS = (ALL_BEGIN, ALL_END, BEGIN, SEP, END)


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    while opener := (yield from cursor.content(ALL_BEGIN, ALL_END, BEGIN)):
        yield from cursor.take(opener)
        if opener == BEGIN and not (yield from _call(cursor, calls)):
            cursor.to_content()
        else:
            cursor.drop()


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


DEEPSEEK_V3 = ToolFormat(read, _MARKERS, (frozenset((BEGIN, SEP, FENCE + "json")),), Layout(
    lambda name: Tag(f"{BEGIN}function{SEP}{name}\n{FENCE}json\n", f"\n{FENCE}{END}"), ALL_BEGIN, "\n", ALL_END,
    ALL_BEGIN))
DEEPSEEK_V31 = ToolFormat(read, _MARKERS, (frozenset((BEGIN, SEP)),), Layout(
    lambda name: Tag(f"{BEGIN}{name}{SEP}", END), ALL_BEGIN, "", ALL_END, ALL_BEGIN))
