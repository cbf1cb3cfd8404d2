"""Qwen 3 Coder: ``<tool_call><function=NAME><parameter=K>V</parameter></function></tool_call>`` on lines of their own.

Values are bare: strings, or JSON where the argument's schema is of another type. A line break at either end of a value
belongs to the markup.
"""

from __future__ import annotations

import re

from ..cursor import Cursor, Step
from .arguments_builder import ArgumentsBuilder
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .registry import TOOL_FORMATS
from .values import is_string, to_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]*")
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    while opener := (yield from cursor.content(OPEN, FUNCTION)):  # models omit <tool_call> at times
        if opener == OPEN:
            yield from cursor.take(OPEN)
            yield from cursor.skip()
        if (yield from cursor.take(FUNCTION)) and (yield from _function(cursor, calls)):
            cursor.drop()
        else:
            cursor.to_content()


def _function(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    name = yield from cursor.run(_NAME)
    if not name or not (yield from cursor.take(">")):
        return False
    calls.begin(name)
    members = ArgumentsBuilder(calls)
    yield from cursor.skip()
    while (yield from cursor.take(PARAMETER)):
        if not (yield from _parameter(cursor, calls, members)):
            return True
        yield from cursor.skip()
    if not (yield from cursor.take(FUNCTION_END)) and cursor.ended:  # cut off: the arguments end as they are
        cursor.pos = len(cursor.text)
        return True
    members.close()
    yield from cursor.skip()
    yield from cursor.take(CLOSE)
    return True


def _parameter(cursor: Cursor, calls: CallEmitter, members: ArgumentsBuilder) -> Step[bool]:
    """Reads ``K>V</parameter>``; False where the text is cut off: the arguments end as they are."""
    start = cursor.pos
    yield from cursor.run(_NAME)
    key = cursor.text[start: cursor.pos]
    if not (yield from cursor.take(">")):
        return False
    yield from cursor.take("\n")
    members.key(key)
    cursor.drop()
    schema = calls.schema(key)
    if is_string(schema) or schema is None:
        members.value('"')
        if not (yield from cursor.until(*_VALUE_ENDS, emit=members.string_delta, trim=False)):
            return False
        members.value('"')
    else:
        if not (yield from cursor.until(*_VALUE_ENDS)):
            return False
        members.value(to_json(cursor.read, schema))
    yield from cursor.take("\n")
    yield from cursor.take(PARAMETER_END)
    cursor.drop()
    return True


QWEN3_CODER = ToolFormat(read, (OPEN, CLOSE), (frozenset((FUNCTION, PARAMETER)),), Layout(
    lambda name: Tag(f"{OPEN}\n{FUNCTION}{name}>\n", f"\n{FUNCTION_END}\n{CLOSE}", "qwen_xml"), between="\n",
    trigger=OPEN))
TOOL_FORMATS.register("qwen3_coder")(QWEN3_CODER)
