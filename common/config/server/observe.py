"""Flags of metrics, request logs, traces and the watchdog."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...api.errors import ConfigError
from ..cli import flag

_OWN_LABELS = frozenset(("model_name", "mode", "simulated", "outcome", "le", "dp_rank"))


@dataclass(frozen=True)
class ObserveArgs:
    sglang_metrics: bool = flag(True, help="export what SGLang measures too under its metrics' names as well")
    bucket_time_to_first_token: tuple[float, ...] = flag((), help="buckets of the time to the first token, in seconds")
    bucket_inter_token_latency: tuple[float, ...] = flag((), help="buckets of the time between tokens, in seconds")
    bucket_e2e_request_latency: tuple[float, ...] = flag((), help="buckets of the time of whole requests, in seconds")
    collect_tokens_histogram: bool = flag(False, help="export histograms of requests' prompt and generated tokens")
    prompt_tokens_buckets: tuple[str, ...] = flag((), metavar="RULE", help=(
        "their buckets of prompt tokens: default, custom BOUND ..., or tse MIDDLE BASE COUNT for bounds on both sides "
        "of MIDDLE whose distances from it are powers of BASE"))
    generation_tokens_buckets: tuple[str, ...] = flag((), metavar="RULE", help="their buckets of generated tokens")
    log_requests: bool = flag(False, help="log each request's beginning and end, as JSON")
    log_requests_level: Literal[0, 1, 2, 3] = flag(2, help=(
        "what --log-requests shows: 0 counts, 1 also sampling parameters, 2 also 2,048 ids of the prompt and "
        "characters of the answer, 3 all of them"))
    crash_dump_folder: str | None = flag(None, help=(
        "folder to which the requests of the last five minutes are written when the engine dies"))
    enable_request_time_stats_logging: bool = flag(False, help=(
        "log how long each request waited, was prefilled, transferred and decoded"))
    enable_metrics_for_all_schedulers: bool = flag(False, help=(
        "export the engine's metrics of each data-parallel rank, with the label dp_rank, instead of their sum"))
    tokenizer_metrics_custom_labels_header: str = flag("x-custom-labels", help=(
        "header in which a request gives values of --tokenizer-metrics-allowed-custom-labels: a JSON object"))
    tokenizer_metrics_allowed_custom_labels: tuple[str, ...] = flag((), help=(
        "further labels of the metrics of requests; a request that gives a label no value has an empty one"))
    gc_warning_threshold_secs: float = flag(0.0, help=(
        "log a warning for each garbage collection that takes longer, in the API server and in ranks (0: never)"))
    show_time_cost: bool = flag(False, help="log how long each stage of starting took")
    watchdog_timeout: float = flag(300.0, help=(
        "seconds after which a rank whose loop hangs prints its threads' stacks and ends (0: never)"))
    enable_nan_detection: bool = flag(False, help=(
        "end requests whose logits are NaN or infinite with an error, instead of answers without meaning"))
    enable_trace: bool = flag(False, help="trace requests to --otlp-traces-endpoint")
    otlp_traces_endpoint: str | None = flag(None, help=(
        "OpenTelemetry collector: HOST:PORT (gRPC) or http://HOST:PORT/v1/traces; turns tracing on (default with "
        "--enable-trace: localhost:4317)"))

    def __post_init__(self) -> None:
        if self.watchdog_timeout < 0:
            raise ConfigError(f"--watchdog-timeout must be 0 or more, not {self.watchdog_timeout}.")
        if not self.gc_warning_threshold_secs >= 0:
            raise ConfigError(f"--gc-warning-threshold-secs must be 0 or more, not {self.gc_warning_threshold_secs:g}.")
        for name in self.tokenizer_metrics_allowed_custom_labels:
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__") or name in _OWN_LABELS:
                raise ConfigError(f"--tokenizer-metrics-allowed-custom-labels: {name} cannot be a label; take letters, "
                                  f"digits and underscores, and none of {', '.join(sorted(_OWN_LABELS))}.")
        for name in ("bucket_time_to_first_token", "bucket_inter_token_latency", "bucket_e2e_request_latency"):
            if (least := min(getattr(self, name), default=1.0)) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {least:g}.")
        token_buckets("--prompt-tokens-buckets", self.prompt_tokens_buckets)
        token_buckets("--generation-tokens-buckets", self.generation_tokens_buckets)

    @property
    def traces_to(self) -> str | None:
        """The collector; None without tracing."""
        return self.otlp_traces_endpoint or ("localhost:4317" if self.enable_trace else None)

    @property
    def log_level_of_requests(self) -> int | None:
        return self.log_requests_level if self.log_requests else None

    @property
    def dump_folder(self) -> Path | None:
        return None if self.crash_dump_folder is None else Path(self.crash_dump_folder).expanduser()


def token_buckets(name: str, rule: tuple[str, ...]) -> tuple[float, ...]:
    """Reads a rule of a histogram of tokens, in SGLang's notation; empty for its default. Raises ConfigError."""
    kind, *words = rule or ("default",)
    try:
        values = [float(word) for word in words]
        if kind == "default" and not values:
            return ()
        if kind in ("custom", "customer") and values:
            return tuple(sorted(set(values)))
        if kind == "tse" and len(values) == 3 and values[1] > 1:
            return _around(values[0], values[1], int(values[2]))
    except ValueError:
        pass
    raise ConfigError(f"{name} takes default, custom BOUND ..., or tse MIDDLE BASE COUNT with a BASE above 1; not "
                      f"{' '.join(rule)}.")


def _around(middle: float, base: float, count: int) -> tuple[float, ...]:
    """``middle``, and at each side of it, half of ``count`` bounds at distances of base, base^2, ... from it."""
    distances = [base ** power for power in range(1, (count + 1) // 2 + 1)]
    return tuple(sorted({middle, *(middle + each for each in distances),
                         *(max(0.0, middle - each) for each in distances)}))
