"""When requests are due, in seconds after a run's beginning."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from .workload import Conversation


def arrivals(conversations: Sequence[Conversation], rate: float | None, rng: random.Random) -> list[float]:
    """The conversations' own times where they have them and no ``rate`` is given; else a Poisson process of ``rate``
    a second, the first at once. At an infinite rate (the default) all are due at once."""
    if rate is None and all(conversation.at is not None for conversation in conversations):
        return [conversation.at or 0.0 for conversation in conversations]
    if rate is None or math.isinf(rate):
        return [0.0] * len(conversations)
    due, times = 0.0, []
    for _ in conversations:
        times.append(due)
        due += rng.expovariate(rate)
    return times
