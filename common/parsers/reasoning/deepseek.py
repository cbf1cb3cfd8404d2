"""DeepSeek's reasoning: R1's template opens it, V3's leaves that to the model."""

from __future__ import annotations

from .format import ReasoningFormat
from .registry import REASONING_FORMATS

REASONING_FORMATS.register("deepseek-r1")(ReasoningFormat(always=True))
REASONING_FORMATS.register("deepseek-v3")(ReasoningFormat())
