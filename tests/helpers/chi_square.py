"""Pearson's chi-square test."""

from __future__ import annotations

import torch

_MIN_EXPECTED = 5.0
"""Cells with a lower expected count are tested as one: the statistic is not chi-square distributed with them."""


def chi_square_p(seen: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Returns the probability that counts like ``seen`` [n], or further off, are drawn from ``probabilities`` [n]
    float64. Cells without probability must be empty: they make it 0."""
    if bool(seen[probabilities == 0].any()):
        return 0.0
    expected = probabilities / probabilities.sum() * seen.sum()
    rare = expected < _MIN_EXPECTED
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts = torch.cat((seen[~rare], seen[rare].sum()[None])).double()
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
