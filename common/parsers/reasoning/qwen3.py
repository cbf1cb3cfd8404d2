"""Qwen 3's reasoning: the template of its thinking models opens it."""

from __future__ import annotations

from .format import ReasoningFormat
from .registry import REASONING_FORMATS

REASONING_FORMATS.register("qwen3")(ReasoningFormat())
REASONING_FORMATS.register("qwen3-thinking")(ReasoningFormat(always=True))
