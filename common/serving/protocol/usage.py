"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..context.generation import Choice
from .responses import Usage


def usage_of(choices: Sequence[Choice], n: int, *, report_cached: bool) -> Usage:
    """A prompt counts once for its ``n`` choices, with the cached tokens of the first; see --enable-cache-report."""
    firsts = choices[::n]
    return Usage.of(
        prompt_tokens=sum(choice.num_prompt_tokens for choice in firsts),
        cached_tokens=sum(choice.num_cached_tokens for choice in firsts) if report_cached else None,
        completion_tokens=sum(choice.num_output_tokens for choice in choices))
