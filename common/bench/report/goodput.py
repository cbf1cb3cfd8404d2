"""Goodput: requests within their service level objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...api.errors import ConfigError
from ..client.answer import Answer

METRICS = ("ttft", "tpot", "e2e")
_SPELT = {"e2el": "e2e"}  # vLLM's


@dataclass(frozen=True)
class Slo:
    """Upper limits in milliseconds, by metric."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo | None:
        """Parse ``ttft:200 tpot:20``; None for no words. Raises ConfigError."""
        limits = {}
        for word in words:
            name, _, value = word.partition(":")
            name = _SPELT.get(name, name)
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = math.nan
            if name not in METRICS or not limits[name] > 0:
                raise ConfigError(f"--goodput takes {', '.join(METRICS)} with milliseconds, as in ttft:200 tpot:20; "
                                  f"{word!r} is not one.")
        return cls(limits) if limits else None

    def kept_by(self, answer: Answer) -> bool:
        """True if the answer is within all limits. One token has no TPOT to miss; a failed answer is never within."""
        if answer.failure is not None:
            return False
        seconds = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2e": answer.e2e}
        found = [(seconds[name], limit) for name, limit in self.limits.items()]
        return all(value is not None and value * 1e3 <= limit for value, limit in found)

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {limit:g} ms" for name, limit in self.limits.items())
