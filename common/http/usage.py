"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..openai.responses import Usage
from .generation import Choice


def usage_of(choices: Sequence[Choice], n: int) -> Usage:
    """A prompt counts once, however many of its ``n`` choices were made from it; its cached tokens are the first's."""
    firsts = choices[::n]
    return Usage.of(
        prompt_tokens=sum(choice.num_prompt_tokens for choice in firsts),
        cached_tokens=sum(choice.num_cached_tokens for choice in firsts),
        completion_tokens=sum(choice.num_output_tokens for choice in choices))
