"""One request as its client saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..workloads.workload import Prompt


class Failure(Exception):
    """A request that was not answered. ``kind`` groups failures: ``HTTP 429``, ``broken stream``, ..."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Drafted:
    """Speculative decoding of an answer: decode steps, the drafts that they verified, and the accepted ones.
    ``histogram``: steps with drafts, by the number of accepted ones; ``simulated``: their number was drawn."""

    num_steps: int
    num_drafts: int
    num_accepted: int
    histogram: Sequence[int] = ()
    simulated: bool = False

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any]) -> Drafted | None:
        """Reads an answer's ``meta_info``; None of an engine that does not draft."""
        steps = meta.get("spec_verify_ct")
        if not steps:
            return None
        return cls(steps, meta.get("spec_draft_token_num", 0), meta.get("spec_accept_token_num", 0),
                   meta.get("spec_accept_histogram", ()), meta.get("spec_acceptance_simulated", False))


@dataclass
class Answer:
    """The answer to one request. Times are in seconds of the run's clock; counts are the server's where it reports any.

    ``first`` to ``last``: the first and the last event that brought tokens; None where the answer came in one piece
    (``first``) or not at all. ``gaps``: seconds between neighbours of these events, however many tokens each brings.
    """

    prompt: Prompt
    output_len: int
    due: float
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    drafted: Drafted | None = None
    text: str = ""
    ids: Sequence[int] = ()
    failure: Failure | None = None

    def record_event(self, now: float) -> None:
        """Record an event that brought tokens."""
        if self.first is None or self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    @property
    def num_events(self) -> int:
        return 0 if self.first is None else len(self.gaps) + 1

    @property
    def num_input_tokens(self) -> int:
        return self.prompt.num_tokens if self.num_prompt is None else self.num_prompt

    @property
    def num_output_tokens(self) -> int:
        """The server's count; one an event where it reports none."""
        return self.num_events if self.num_output is None else self.num_output

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> float | None:
        return None if self.last is None else self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        if self.first is None or self.last is None or self.num_output_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_output_tokens - 1)
