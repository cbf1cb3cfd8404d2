"""Reasoning of GLM 4.5."""

from __future__ import annotations

from .format import ReasoningFormat
from .registry import REASONING_FORMATS

REASONING_FORMATS.register("glm45")(ReasoningFormat())
