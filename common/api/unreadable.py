"""What decoding bytes that somebody sent may raise: catch all of it, or one of them ends who reads."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Of msgspec's decoders: text that is not UTF-8 and nesting that is too deep come as Python's own errors."""
