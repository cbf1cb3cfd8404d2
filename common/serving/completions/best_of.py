"""Which of a prompt's choices are told, where more were made than are wanted (``best_of``)."""

from __future__ import annotations

from collections.abc import Sequence

from ..generation import Choice


def best(choices: Sequence[Choice], made: int, wanted: int) -> list[Choice]:
    """Of each prompt's ``made`` choices the ``wanted`` with the highest log-probability a token, best first.

    They are numbered anew, as the answer's choices.
    """
    if made == wanted:
        return list(choices)
    found: list[Choice] = []
    for start in range(0, len(choices), made):
        ranked = sorted(choices[start:start + made], key=mean_logprob, reverse=True)
        found += ranked[:wanted]
    for index, choice in enumerate(found):
        choice.index = index
    return found


def mean_logprob(choice: Choice) -> float:
    """Per token of the output; of an empty one 0."""
    values = [] if choice.logprobs is None else [value for value in choice.logprobs.values if value is not None]
    return sum(values) / len(values) if values else 0.0
