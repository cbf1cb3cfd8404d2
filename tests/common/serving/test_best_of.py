from __future__ import annotations

from dataclasses import dataclass

import pytest

from baton.common.api.messages import Logprobs
from baton.common.serving.completions.best_of import best, mean_logprob


@dataclass
class Made:
    index: int
    logprobs: Logprobs | None


def made(*values: list[float]) -> list[Made]:
    return [Made(i, Logprobs([1] * len(some), list(some))) for i, some in enumerate(values)]


def test_the_best_of_each_prompt_are_numbered_anew() -> None:
    choices = made([-3.0], [-1.0, -1.5], [-2.0] * 5, [-4.0], [-0.5, -9.0], [-4.5])
    first, second, third, fourth = best(choices, 3, 2)  # type: ignore[arg-type, type-var]
    assert [first, second, third, fourth] == [choices[1], choices[2], choices[3], choices[5]]
    assert [choice.index for choice in (first, second, third, fourth)] == [0, 1, 2, 3]


def test_where_all_are_wanted_they_keep_their_order() -> None:
    choices = made([-3.0], [-1.0])
    assert best(choices, 2, 2) == choices  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(("values", "mean"), [([], 0.0), ([-1.0, -2.0], -1.5)])
def test_mean(values: list[float], mean: float) -> None:
    assert mean_logprob(made(values)[0]) == mean  # type: ignore[arg-type]
