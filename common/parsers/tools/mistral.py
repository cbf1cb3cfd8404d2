"""``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` since tokenizer v11."""

from __future__ import annotations

import json
import re

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import envelope, json_arguments, json_object
from .registry import TOOL_FORMATS

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.\-]*")


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    while (yield from cursor.content(OPEN)):
        yield from cursor.take(OPEN)
        yield from cursor.skip()
        read_calls = _array if (yield from cursor.take("[")) else _named
        if (yield from read_calls(cursor, calls)):
            cursor.drop()
        else:
            cursor.to_content()


def _array(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    emitted = False
    while (yield from envelope(cursor, calls, OPEN)):
        emitted = True
        cursor.drop()
        yield from cursor.skip()
        if not (yield from cursor.take(",")):
            break
        cursor.drop()
    yield from cursor.skip()
    if emitted:
        yield from cursor.take("]")
    return emitted


def _named(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    name = yield from cursor.run(_NAME)
    if name and (yield from cursor.take(CALL_ID)):
        yield from cursor.run(_NAME)
    if not name:
        return False
    yield from cursor.take(ARGS)
    if not (yield from json_object(cursor)):
        return False
    calls.begin(name)
    yield from json_arguments(cursor, calls, OPEN)
    return True


MISTRAL = ToolFormat(read, (OPEN, CALL_ID, ARGS), (frozenset((OPEN,)),), Layout(
    lambda name: Tag(f'{{"name": {json.dumps(name)}, "arguments": ', "}"), f"{OPEN} [", ", ", "]", trigger=OPEN),
    generality=1)
TOOL_FORMATS.register("mistral")(MISTRAL)
