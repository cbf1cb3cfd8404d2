"""gpt-oss's reasoning, on channels of the harmony format."""

from __future__ import annotations

from .format import ReasoningFormat
from .registry import REASONING_FORMATS

REASONING_FORMATS.register("gpt-oss")(ReasoningFormat(harmony=True))
