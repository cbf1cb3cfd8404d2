"""Single measurements of a server, from which a cost table is fitted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PromptSample:
    """Milliseconds from sending a prompt alone until its first token was read."""

    tokens: int
    ms: float


@dataclass(frozen=True)
class PrefillSample:
    """Milliseconds of a step among many that compute prompts, with its tokens and pairs of tokens (see StepCosts)."""

    tokens: int
    pairs: float
    ms: float


@dataclass(frozen=True)
class DecodeSample:
    """Milliseconds of a decode step of ``rows`` requests with ``context`` tokens in all. ``spread``: from the first
    stream's event to the last one's."""

    rows: int
    context: float
    ms: float
    spread: float


@dataclass(frozen=True)
class BurstSample:
    """Milliseconds from sending ``requests`` short prompts at once until the last first token was read."""

    requests: int
    tokens: int
    ms: float


@dataclass
class Samples:
    """All of a server. ``pair``: prompts alone through a pair; ``written`` bytes, ``write_seconds`` and
    ``written_tokens`` of its prefill server meanwhile."""

    prompts: list[PromptSample] = field(default_factory=list)
    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    bursts: list[BurstSample] = field(default_factory=list)
    pair: list[PromptSample] = field(default_factory=list)
    written: float = 0.0
    write_seconds: float = 0.0
    written_tokens: int = 0
    kv_tokens: int = 0
    page_size: int = 16
    chunk: int = 8192
    device: str = ""
    model: str = ""
