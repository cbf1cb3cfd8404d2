"""JSON and server-sent events."""

from __future__ import annotations

import msgspec

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"
