"""``[{"name": ..., "parameters": {...}}, ...]``: enforced by a grammar on models without a format of their own."""

from __future__ import annotations

import json

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .json_call import envelope


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    yield from cursor.skip()
    yield from cursor.take("[")
    while (yield from envelope(cursor, calls)):
        cursor.drop()
        yield from cursor.skip(" \t\r\n,")
        cursor.drop()
        if (yield from cursor.take("]")):
            cursor.drop()
            break
    cursor.to_content()
    yield from cursor.content()


JSON_ARRAY = ToolFormat(read, layout=Layout(
    lambda name: Tag(f'{{"name": {json.dumps(name)}, "parameters": ', "}"), "[", ", ", "]"))
