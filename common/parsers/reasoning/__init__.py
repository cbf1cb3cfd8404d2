"""Reasoning in a model's answer: how each family of models writes it. No torch."""

from .format import ReasoningFormat
from .parser import ReasoningParser, begins_after, begins_inside, continues_inside
from .registry import REASONING_FORMATS

__all__ = [
    "REASONING_FORMATS", "ReasoningFormat", "ReasoningParser", "begins_after", "begins_inside", "continues_inside",
]
