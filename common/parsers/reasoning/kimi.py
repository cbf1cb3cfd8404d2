"""Kimi's reasoning; K2's may be interrupted by tool calls."""

from __future__ import annotations

from ..tools.kimi_k2 import ALL_BEGIN
from .format import ReasoningFormat
from .registry import REASONING_FORMATS

REASONING_FORMATS.register("kimi")(ReasoningFormat("◁think▷", "◁/think▷"))
REASONING_FORMATS.register("kimi_k2")(ReasoningFormat(interrupters=(ALL_BEGIN,)))
