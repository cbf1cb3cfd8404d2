"""Reasoning in a model's answer: how each family of models writes it. No torch."""

from .format import ReasoningFormat
from .registry import REASONING
from .think import ThinkReader, begins_after, begins_inside, continues_inside

__all__ = ["REASONING", "ReasoningFormat", "ThinkReader", "begins_after", "begins_inside", "continues_inside"]
