"""The exceptions that decoding received bytes may raise: a reader must catch all of them to survive any input."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec's decoders, and Python's own for text that is not UTF-8 and nesting that is too deep."""
