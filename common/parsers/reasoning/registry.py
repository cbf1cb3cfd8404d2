"""Reasoning formats by SGLang's names; one family of models a file."""

from __future__ import annotations

from ...registry import Registry
from .format import ReasoningFormat

REASONING_FORMATS: Registry[ReasoningFormat] = Registry("reasoning parser", "baton.common.parsers.reasoning")
