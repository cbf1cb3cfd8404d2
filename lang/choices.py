"""Methods that choose one of several texts by the log-probabilities of their tokens.

The three are those of SGLang's documents; the normalizations are described in
https://blog.eleuther.ai/multiple-choice-normalization/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TokenLogprob = Sequence[Any]
"""``[log-probability or None, token id, text or None]``, as ``/generate`` has it."""


@dataclass(frozen=True)
class ScoredChoices:
    """Candidates with their tokens' log-probabilities after the prompt, and without it where a method asks for that."""

    choices: Sequence[str]
    tokens: Sequence[Sequence[TokenLogprob]]
    unconditional: Sequence[Sequence[TokenLogprob]] | None = None

    def averages(self) -> list[float]:
        """The mean log-probability of each choice's tokens; those without one (the first of a text) are left out."""
        return [_mean([token[0] for token in each if token[0] is not None]) for each in self.tokens]


@dataclass(frozen=True)
class Decision:
    choice: str
    meta_info: dict[str, Any]


@dataclass(frozen=True)
class ChoicesMethod:
    """A way to choose: ``scores`` gives each choice a number or a list of numbers, of which the greatest wins."""

    name: str
    scores: Callable[[ScoredChoices], tuple[list[Any], dict[str, Any]]]
    needs_unconditional: bool = False

    def __call__(self, scored: ScoredChoices) -> Decision:
        """The first of the best choices, with all log-probabilities as ``meta_info``."""
        scores, details = self.scores(scored)
        info = {"normalized_prompt_logprobs": scored.averages(), "input_token_logprobs": list(scored.tokens), **details}
        return Decision(scored.choices[max(range(len(scores)), key=scores.__getitem__)], info)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("-inf")


def _average_scores(scored: ScoredChoices) -> tuple[list[float], dict[str, Any]]:
    return scored.averages(), {}


def _greedy_scores(scored: ScoredChoices) -> tuple[list[list[float]], dict[str, Any]]:
    """Compares token by token. A choice that ends before others goes on with its average."""
    width = max(map(len, scored.tokens))
    rows = [[average if token[0] is None else token[0] for token in each] + [average] * (width - len(each))
            for each, average in zip(scored.tokens, scored.averages())]
    return rows, {"greedy_logprob_matrix": rows}


def _unconditional_scores(scored: ScoredChoices) -> tuple[list[float], dict[str, Any]]:
    assert scored.unconditional is not None
    scores = [_mean([(token[0] or 0.0) - (alone[0] or 0.0) for token, alone in zip(tokens, unconditional)])
              for tokens, unconditional in zip(scored.tokens, scored.unconditional)]
    return scores, {"unconditional_token_logprobs": list(scored.unconditional),
                    "normalized_unconditional_prompt_logprobs": scores}


token_length_normalized = ChoicesMethod("token_length_normalized", _average_scores)
"""Takes the greatest mean log-probability."""
greedy_token_selection = ChoicesMethod("greedy_token_selection", _greedy_scores)
"""Takes the most likely first token, at a tie the second, and so on."""
unconditional_likelihood_normalized = ChoicesMethod("unconditional_likelihood_normalized", _unconditional_scores,
                                                    needs_unconditional=True)
"""Takes the greatest mean gain over the log-probabilities that the tokens have without the prompt."""
