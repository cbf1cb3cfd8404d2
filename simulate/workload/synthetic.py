"""Synthetic workloads: arrivals by a Poisson or Gamma process, lengths by a distribution, shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...common.api.errors import ConfigError
from .request import SimRequest


@dataclass(frozen=True)
class Lengths:
    """Distribution of a length: ``mean`` tokens with a coefficient of variation ``cv``: 0 always the mean, else
    log-normal, cut to ``[1, most]``."""

    mean: float
    cv: float = 0.0
    most: int = 1 << 20

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns [count] int64."""
        if not self.cv:
            return np.full(count, max(1, min(round(self.mean), self.most)), np.int64)
        sigma2 = np.log1p(self.cv**2)
        drawn = rng.lognormal(np.log(self.mean) - sigma2 / 2, np.sqrt(sigma2), count)
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Reads ``MEAN`` or ``MEAN:CV``. Raises ConfigError."""
        mean, _, cv = text.partition(":")
        try:
            found = cls(float(mean), float(cv or 0))
        except ValueError:
            found = cls(0.0)
        if not (0 < found.mean < float("inf") and 0 <= found.cv < float("inf")):
            raise ConfigError(f"{flag} takes a mean length and its coefficient of variation, as in 1024 or 1024:0.8; "
                              f"{text!r} is not one.")
        return found


def arrivals(rate: float, count: int, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Returns ``count`` arrival times in seconds, ``rate`` a second, whose intervals have the coefficient of variation
    ``cv``: 1 is a Poisson process, 0 a metronome, more is bursty (Gamma)."""
    if cv == 0:
        gaps = np.full(count, 1.0 / rate)
    else:
        shape = 1.0 / cv**2
        gaps = rng.gamma(shape, 1.0 / (rate * shape), count)
    return np.cumsum(gaps)


def synthetic(rate: float, count: int, inputs: Lengths, outputs: Lengths, *, cv: float = 1.0, groups: int = 0,
              shared: int = 0, seed: int = 0) -> list[SimRequest]:
    """``count`` requests at ``rate`` a second. With ``groups`` each prompt begins with the ``shared`` tokens of one of
    so many groups, drawn evenly."""
    if not (0 < rate < float("inf")) or count < 1 or cv < 0:
        raise ConfigError("A synthetic workload needs --rate above 0, --num-requests of 1 or more and --arrival-cv of "
                          "0 or more.")
    rng = np.random.default_rng(seed)
    times = arrivals(rate, count, cv, rng)
    input_lens, output_lens = inputs.draw(rng, count), outputs.draw(rng, count)
    of_group = rng.integers(0, groups, count) if groups else None
    made = []
    for i, (at, input_len, output_len) in enumerate(zip(times.tolist(), input_lens.tolist(), output_lens.tolist())):
        blocks = () if of_group is None or not shared else (int(of_group[i]),)
        made.append(SimRequest(at, input_len + (shared if blocks else 0), output_len, blocks, shared or 512))
    return made
