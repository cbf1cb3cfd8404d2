"""GLM 4.5 to 4.7: ``<tool_call>NAME``, then ``<arg_key>K</arg_key><arg_value>V</arg_value>`` pairs, ``</tool_call>``.

Values are bare strings, or JSON where the argument's schema is of another type.
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
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.\-]*")


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    while (yield from cursor.content(OPEN)):
        yield from cursor.take(OPEN)
        if (yield from _call(cursor, calls)):
            cursor.drop()
        else:
            cursor.to_content()


def _call(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    yield from cursor.skip()
    name = yield from cursor.run(_NAME)
    yield from cursor.skip()
    closed = bool(name) and (yield from cursor.take(CLOSE))
    if not name or not (closed or (yield from cursor.take(KEY))):
        return False
    calls.begin(name)
    members = ArgumentsBuilder(calls)
    while not closed:
        if not (yield from _pair(cursor, calls, members)):
            return True
        yield from cursor.skip()
        closed = not (yield from cursor.take(KEY))
        if closed and not (yield from cursor.take(CLOSE)) and cursor.ended:  # cut off: the arguments end as they are
            cursor.pos = len(cursor.text)
            return True
    members.close()
    return True


def _pair(cursor: Cursor, calls: CallEmitter, members: ArgumentsBuilder) -> Step[bool]:
    """Reads a key, after its opening, and its value; False where the text is cut off: the arguments end as they are."""
    start = cursor.pos
    if not (yield from cursor.until(KEY_END)):
        return False
    key = cursor.text[start: cursor.pos].strip()
    yield from cursor.take(KEY_END)
    yield from cursor.skip()
    if not (yield from cursor.take(VALUE)):
        return False
    members.key(key)
    cursor.drop()
    schema = calls.schema(key)
    if is_string(schema):
        members.value('"')
        if not (yield from cursor.until(VALUE_END, emit=members.string_delta, trim=False)):
            return False
        members.value('"')
    else:
        if not (yield from cursor.until(VALUE_END)):
            return False
        members.value(to_json(cursor.read, schema))
    yield from cursor.take(VALUE_END)
    cursor.drop()
    return True


GLM45 = ToolFormat(read, (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END), (frozenset((KEY, VALUE)),), Layout(
    lambda name: Tag(f"{OPEN}{name}\n", f"\n{CLOSE}", "glm_xml"), between="\n", trigger=OPEN))
TOOL_FORMATS.register("glm45", "glm", "glm47")(GLM45)
