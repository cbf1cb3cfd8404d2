"""The value of --speculative-simulate-acceptance: shares of accepted drafts by position."""

from __future__ import annotations

from ...api.errors import ConfigError


def parse_shares(text: str, num_drafts: int) -> tuple[float, ...]:
    """Returns the share of steps [num_drafts at most] in which a draft and those before it are accepted, by position.

    ``text``: these shares, or one number from 1 on, the mean tokens of a step: each draft is then as likely to be
    accepted as the one before, if that is. Raises ConfigError.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or any(value != value for value in values):
        raise ConfigError("--speculative-simulate-acceptance takes a mean length, 2.88, or shares by position, "
                          f"0.83,0.6,0.45; not {text}.")
    if len(values) == 1 and values[0] >= 1:
        if values[0] > num_drafts + 1:
            raise ConfigError(f"--speculative-simulate-acceptance cannot be {text}: a step with {num_drafts} drafts "
                              f"yields 1 to {num_drafts + 1} tokens.")
        return _geometric(values[0] - 1, num_drafts)
    if any(not 0 <= value <= before for before, value in zip((1.0, *values), values)):
        raise ConfigError("--speculative-simulate-acceptance: shares must be between 0 and 1, and none above the one "
                          f"before; not {text}.")
    return values[:num_drafts]


def _geometric(mean: float, count: int) -> tuple[float, ...]:
    """Returns p, p^2, ... p^count whose sum is ``mean``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle ** power for power in range(1, count + 1)) < mean:
            low = middle
        else:
            high = middle
    return tuple(high ** power for power in range(1, count + 1))
