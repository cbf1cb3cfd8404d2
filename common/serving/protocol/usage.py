"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..context import ServingContext
from ..generation import Choice
from .responses import Usage


def usage_of(front: ServingContext, choices: Sequence[Choice], n: int) -> Usage:
    """A prompt counts once, however many of its ``n`` choices were made from it; its cached tokens are the first's."""
    firsts, told = choices[::n], front.config.answers.enable_cache_report
    return Usage.of(
        prompt_tokens=sum(choice.num_prompt_tokens for choice in firsts),
        cached_tokens=sum(choice.num_cached_tokens for choice in firsts) if told else None,
        completion_tokens=sum(choice.num_output_tokens for choice in choices))
