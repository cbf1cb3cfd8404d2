"""ShareGPT-like files: JSON with conversations. They have no times, and no token counts: four characters are a token.

Each turn of a conversation is a request whose prompt begins with all turns before it; all are due at once, so that a
``--rate`` is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..request import SimRequest
from .base import TRACE_FORMATS

CHARACTERS_A_TOKEN = 4
_SHARED_TOKENS = 64
"""Tokens of a block, of which later turns share whole ones."""


class ShareGPT:
    def matches(self, head: str) -> bool:
        return head.lstrip().startswith("[") and '"conversation' in head

    def read(self, path: Path, count: int | None) -> list[SimRequest]:
        made: list[SimRequest] = []
        for number, entry in enumerate(json.loads(path.read_text(encoding="utf-8-sig"))):
            for request in _turns(entry.get("conversations") or entry.get("conversation") or [], number):
                if len(made) == count:
                    return made
                made.append(request)
        return made


def _turns(messages: list[dict[str, Any]], number: int) -> Iterator[SimRequest]:
    context = 0
    for question, answer in zip(messages[::2], messages[1::2]):
        context += _tokens(question)
        blocks = tuple(number << 10 | block for block in range(min(context // _SHARED_TOKENS, 1 << 10)))
        output = _tokens(answer)
        yield SimRequest(0.0, context, output, blocks, _SHARED_TOKENS)
        context += output


def _tokens(message: dict[str, Any]) -> int:
    text = message["value"] if "value" in message else message["content"]
    return -(-len(text) // CHARACTERS_A_TOKEN)


TRACE_FORMATS.register("sharegpt")(ShareGPT())
