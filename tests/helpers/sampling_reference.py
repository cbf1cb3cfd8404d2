"""Sampling parameters as their definition says, one token after the other, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from baton.common.api.sampling import SamplingParams


def penalized(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int],
              output: Sequence[int]) -> list[float]:
    """Logits after penalties and bias."""
    found = list(logits)
    for token in range(len(logits)):
        count = output.count(token)
        if count:
            found[token] -= count * params.frequency_penalty + params.presence_penalty
        if count or token in prompt:
            penalty = params.repetition_penalty
            found[token] = found[token] * penalty if found[token] < 0 else found[token] / penalty
        found[token] += params.logit_bias.get(token, 0)
    return found
