"""Mistral's reasoning."""

from __future__ import annotations

from .format import ReasoningFormat
from .registry import REASONING_FORMATS

REASONING_FORMATS.register("mistral")(ReasoningFormat("[THINK]", "[/THINK]"))
