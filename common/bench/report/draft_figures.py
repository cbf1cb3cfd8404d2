"""Figures of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..client.answer import Drafted


@dataclass(frozen=True)
class DraftFigures:
    """Totals over the answers of a server that drafts. ``histogram``: steps with drafts, by the number of accepted
    ones, where the server reports it; ``simulated``: acceptance was drawn."""

    num_tokens: int
    num_steps: int
    num_drafts: int
    num_accepted: int
    histogram: Sequence[int]
    simulated: bool

    @classmethod
    def of(cls, drafted: Iterable[tuple[Drafted | None, int]]) -> DraftFigures | None:
        """Sums what answers report, each with its output tokens; None where none does."""
        found = [(report, tokens) for report, tokens in drafted if report is not None]
        if not found:
            return None
        size = max(len(report.histogram) for report, _ in found)
        return cls(sum(tokens for _, tokens in found), sum(report.num_steps for report, _ in found),
                   sum(report.num_drafts for report, _ in found), sum(report.num_accepted for report, _ in found),
                   [sum(report.histogram[i] for report, _ in found if i < len(report.histogram)) for i in range(size)],
                   any(report.simulated for report, _ in found))

    @property
    def length(self) -> float | None:
        """Tokens a decode step, as SGLang counts them: with the prompt's."""
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def rate(self) -> float | None:
        """Share of the drafts that were accepted."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def by_position(self) -> list[float]:
        """The share of steps with drafts that accepted the draft at each position."""
        steps = sum(self.histogram)
        return [sum(self.histogram[position:]) / steps for position in range(1, len(self.histogram))] if steps else []

    def keyed(self) -> dict[str, Any]:
        """SGLang's key, then ours."""
        return {"accept_length": self.length, "accept_rate": self.rate, "accept_by_position": self.by_position,
                "accept_histogram": list(self.histogram), "verify_steps": self.num_steps,
                "acceptance_simulated": self.simulated}

    def __str__(self) -> str:
        parts = ["SIMULATED:"] if self.simulated else []
        parts.append(f"{self.length or 0:.2f} tokens a step")
        if self.rate is not None:
            parts.append(f"({self.rate:.1%} of {self.num_drafts:,} drafts")
            shares = ", ".join(f"{share:.0%}" for share in self.by_position)
            parts[-1] += f"; by position {shares})" if shares else ")"
        return " ".join(parts)
