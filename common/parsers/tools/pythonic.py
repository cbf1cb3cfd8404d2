"""``[f(a=1, b="x"), g()]``: calls as Python writes them, by Llama 4 (between two tags of its own) and Llama 3.2.

A bracket is a call only where the name of an offered tool and a parenthesis follow it. A value is emitted once it is
complete.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from ..cursor import Cursor, Step
from .arguments_builder import ArgumentsBuilder
from .call_emitter import CallEmitter
from .format import ToolFormat
from .registry import TOOL_FORMATS
from .values import quoted

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.\-]*")
_QUOTES = "\"'"


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    while opener := (yield from cursor.content(START, END, "[")):
        yield from cursor.take(opener)
        if opener == END:
            cursor.drop()
            continue
        if opener == START:
            yield from cursor.skip()
            yield from cursor.take("[")
        if (yield from _list(cursor, calls)):
            cursor.drop()
        else:
            cursor.to_content()


def _list(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    emitted = False
    while True:
        yield from cursor.skip()
        name = yield from cursor.run(_NAME)
        if not name or not calls.offers(name) or not (yield from cursor.take("(")):
            return emitted and not name and (yield from cursor.take("]"))
        calls.begin(name)
        emitted = True
        if not (yield from _arguments(cursor, calls)):
            return True
        cursor.drop()
        yield from cursor.skip()
        if not (yield from cursor.take(",")):
            yield from cursor.take("]")
            return True


def _arguments(cursor: Cursor, calls: CallEmitter) -> Step[bool]:
    """Reads up to the closing parenthesis; False where the text is cut off: the arguments end as they are."""
    members = ArgumentsBuilder(calls)
    while True:
        yield from cursor.skip(" \t\r\n,")
        if (yield from cursor.take(")")):
            members.close()
            return True
        key = yield from cursor.run(_NAME)
        yield from cursor.skip()
        if not key or not (yield from cursor.take("=")):
            return False
        start = cursor.pos
        if not (yield from _to_end_of_value(cursor)):
            return False
        members.key(key)
        members.value(_json(cursor.text[start: cursor.pos]))
        cursor.drop()


def _to_end_of_value(cursor: Cursor) -> Step[bool]:
    """Reads a value; the comma or parenthesis that follows it comes next."""
    depth, quote = 0, ""
    while True:
        while cursor.next:
            char = cursor.next
            if quote:
                if char == "\\":
                    if len(cursor.text) < cursor.pos + 2:
                        break  # the escaped character has not arrived
                    cursor.pos += 1
                elif char == quote:
                    quote = ""
            elif char in _QUOTES:
                quote = char
            elif depth <= 0 and char in ",)":
                return True
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            cursor.pos += 1
        if not (yield from cursor.more()):
            return False


def _json(text: str) -> str:
    """A Python literal as JSON; JSON stays as it is, and any other text becomes a string."""
    text = text.strip()
    try:
        return json.dumps(_plain(ast.literal_eval(text)), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    try:
        json.loads(text)
        return text
    except (ValueError, RecursionError):
        return quoted(text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError("no JSON value")


PYTHONIC = ToolFormat(read, (START, END), (
    frozenset((START,)), frozenset(("[func_name1(params_name1=params_value1",))), generality=3)
TOOL_FORMATS.register("llama4", "pythonic")(PYTHONIC)
