"""Flags of retries."""

from __future__ import annotations

import dataclasses

from ...common.config.cli import flag
from .checks import not_negative


@dataclasses.dataclass(frozen=True)
class RetryArgs:
    retry_max_retries: int = flag(5, help="attempts after the first one, before the first byte of an answer")
    retry_initial_backoff_ms: float = flag(50.0, help="wait before the first retry")
    retry_max_backoff_ms: float = flag(30000.0, help="longest wait between retries")
    retry_backoff_multiplier: float = flag(1.5, help="growth of the wait from one retry to the next")
    retry_jitter_factor: float = flag(0.2, help="random share, up or down, of each wait")

    disable_retries: bool = flag(False, help="the same as --retry-max-retries 0")

    stream_continuation: bool = flag(
        True, help="continue a greedy or seeded stream on another Baton worker when its own dies")
    poison_refusal_secs: float = flag(
        300.0, help=(
        "how long a request under which workers died one after the other is refused (400, poison_request); 0: never"))
    local_prefill_tokens: int = flag(
        0, help="decode servers prefill prompts themselves of which they lack at most about this many tokens")

    def __post_init__(self) -> None:
        not_negative(self, "local_prefill_tokens", "poison_refusal_secs",
                     "retry_max_retries", "retry_initial_backoff_ms", "retry_max_backoff_ms",
                     "retry_jitter_factor")

    @property
    def most(self) -> int:
        return 0 if self.disable_retries else self.retry_max_retries
