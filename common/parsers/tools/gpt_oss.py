"""gpt-oss's calls, which are messages of the harmony format; without a reasoning parser, reasoning is dropped."""

from __future__ import annotations

from ..cursor import Cursor, Step
from ..harmony import CHANNEL, CONSTRAIN, MARKERS, MESSAGE, Harmony
from .call_emitter import CallEmitter
from .format import Layout, Tag, ToolFormat
from .registry import TOOL_FORMATS


def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
    yield from Harmony(with_calls=True, as_part=None).read(cursor, calls)


_BEGIN = f"{CHANNEL}commentary to=functions."

# <|call|> is one of the model's stop tokens: it ends the answer, so that there is one call.
GPT_OSS = ToolFormat(read, MARKERS, (frozenset((CHANNEL, MESSAGE)),), Layout(
    lambda name: Tag(f"{_BEGIN}{name} {CONSTRAIN}json{MESSAGE}", ""), trigger=_BEGIN, single=True))
TOOL_FORMATS.register("gpt-oss")(GPT_OSS)
