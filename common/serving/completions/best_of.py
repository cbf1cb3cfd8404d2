"""The choices that an answer returns where more were generated (``best_of``)."""

from __future__ import annotations

from collections.abc import Sequence

from ..context.generation import Choice


def best(choices: Sequence[Choice], num_generated: int, num_returned: int) -> list[Choice]:
    """The ``num_returned`` choices with the highest log-probability a token of each prompt's ``num_generated``, best
    first.

    They are numbered anew, as the answer's choices.
    """
    if num_generated == num_returned:
        return list(choices)
    chosen: list[Choice] = []
    for start in range(0, len(choices), num_generated):
        ranked = sorted(choices[start:start + num_generated], key=mean_logprob, reverse=True)
        chosen += ranked[:num_returned]
    for index, choice in enumerate(chosen):
        choice.index = index
    return chosen


def mean_logprob(choice: Choice) -> float:
    """The mean log-probability a token of the output; 0 for an empty one."""
    values = [] if choice.logprobs is None else [value for value in choice.logprobs.values if value is not None]
    return sum(values) / len(values) if values else 0.0
