"""Reasoning in a model's answer: how each family of models writes it. No torch."""

from .format import ReasoningFormat
from .parser import ReasoningParser, begins_after, begins_inside, continues_inside
from .registry import REASONING

__all__ = ["REASONING", "ReasoningFormat", "ReasoningParser", "begins_after", "begins_inside", "continues_inside"]
