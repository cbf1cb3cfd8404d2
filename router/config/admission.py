"""Flags of admission: how many requests run, wait, and are refused."""

from __future__ import annotations

import dataclasses

from ...common.config.cli import flag
from .checks import not_negative

REFUSALS = ("rate", "key", "slo", "queue_full", "queue_timeout")
"""Reasons for which admission refuses requests, as the metrics name them."""


@dataclasses.dataclass(frozen=True)
class AdmissionRules:
    """Limits of admission; 0 means no limit. Rates are requests a second, times are in seconds."""

    max_concurrent: int = 0
    queue_size: int = 100
    queue_timeout: float = 60.0
    rate: float = 0.0
    max_concurrent_per_key: int = 0
    rate_per_key: float = 0.0
    slo_ttft: float = 0.0
    slo_of_requests: bool = False

    @property
    def active(self) -> bool:
        return bool(self.max_concurrent or self.rate or self.per_key or self.estimates_ttft)

    @property
    def estimates_ttft(self) -> bool:
        return bool(self.slo_ttft or self.slo_of_requests)

    @property
    def per_key(self) -> bool:
        return bool(self.max_concurrent_per_key or self.rate_per_key)


@dataclasses.dataclass(frozen=True)
class AdmissionArgs:
    max_concurrent_requests: int = flag(
        8192, help="requests that run at once; more wait in the queue (0 or less: no limit)")
    queue_size: int = flag(100, help="requests that may wait; more get 429")
    queue_timeout_secs: float = flag(60.0, help="longest wait in the queue; then 408")
    rate_limit_tokens_per_second: float = flag(
        0.0, help="requests let in a second (a token each, saved for one second at most); more get 429; 0: no limit")
    max_concurrent_requests_per_key: int = flag(0, help="requests of one API key that run or wait at once; 0: no limit")
    rate_limit_per_key: float = flag(0.0, help="requests of one API key let in a second; 0: no limit")
    slo_ttft_ms: float = flag(
        0.0, help="refuse a streamed request with 429 when its first token is expected later than this; 0: never")
    enable_slo_admission: bool = flag(False, help=(
        "refuse a streamed request with 429 when its first token is expected later than its own slo_ttft_ms, of its "
        "body or of the header x-slo-ttft-ms"))

    def __post_init__(self) -> None:
        not_negative(self, "queue_size", "queue_timeout_secs", "rate_limit_tokens_per_second",
                     "max_concurrent_requests_per_key", "rate_limit_per_key", "slo_ttft_ms")

    @property
    def rules(self) -> AdmissionRules:
        return AdmissionRules(max(0, self.max_concurrent_requests), self.queue_size, self.queue_timeout_secs,
                              self.rate_limit_tokens_per_second, self.max_concurrent_requests_per_key,
                              self.rate_limit_per_key, self.slo_ttft_ms / 1e3, self.enable_slo_admission)
