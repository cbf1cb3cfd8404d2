"""gpt-oss's calls, which are messages of the harmony format; where nobody asks for its reasoning, that is left out."""

from __future__ import annotations

from ..cursor import Cursor, Step
from ..harmony import CALL, CHANNEL, CONSTRAIN, MARKERS, MESSAGE, START, Harmony
from .calls import Calls
from .format import Layout, Tag, ToolFormat


def read(cursor: Cursor, calls: Calls) -> Step[None]:
    yield from Harmony(with_calls=True, as_part=None).read(cursor, calls)


_BEGIN = f"{CHANNEL}commentary to=functions."

GPT_OSS = ToolFormat(read, MARKERS, (frozenset((CHANNEL, MESSAGE)),), Layout(
    lambda name: Tag(f"{_BEGIN}{name} {CONSTRAIN}json{MESSAGE}", CALL), _BEGIN, between=f"{START}assistant"))
