"""Flags of metrics, request logs, traces and the watchdog."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ...api.errors import ConfigError
from ..cli import flag
from ..rules import Rule, at_least, check_own_rules, json_object

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
    log_requests: bool = flag(False, help="log each request's beginning and end")
    log_requests_level: Literal[0, 1, 2, 3] = flag(2, help=(
        "what --log-requests shows: 0 counts, 1 also sampling parameters, 2 also 2,048 ids of the prompt and "
        "characters of the answer, 3 all of them"))
    log_requests_format: Literal["json", "text"] = flag("json", help=(
        "how --log-requests shows a request: a JSON object, or words name=value"))
    log_requests_target: tuple[str, ...] = flag((), metavar="TARGET", help=(
        "where --log-requests writes instead of the log: stdout, and folders, each with a file requests.log"))
    crash_dump_folder: str | None = flag(None, help=(
        "folder to which the requests of the last five minutes are written when the engine dies"))
    enable_request_time_stats_logging: bool = flag(False, help=(
        "log how long each request waited, was prefilled, transferred and decoded"))
    enable_metrics_for_all_schedulers: bool = flag(False, help=(
        "export the engine's metrics of each data-parallel rank, with the label dp_rank, instead of their sum"))
    extra_metric_labels: str | None = flag(None, metavar="JSON", help=(
        "further labels of all metrics of the server, as {\"team\": \"search\"}"))
    export_metrics_to_file: bool = flag(False, help=(
        "write a line of JSON for each request that ended, with its parameters as --log-requests-level says, its "
        "tokens and times, to a file an hour in --export-metrics-to-file-dir; no file is removed"))
    export_metrics_to_file_dir: str | None = flag(None, help="folder of --export-metrics-to-file")
    tokenizer_metrics_custom_labels_header: str = flag("x-custom-labels", help=(
        "header in which a request gives values of --tokenizer-metrics-allowed-custom-labels: a JSON object"))
    tokenizer_metrics_allowed_custom_labels: tuple[str, ...] = flag((), help=(
        "further labels of the metrics of requests; a request that gives a label no value has an empty one"))
    gc_warning_threshold_secs: float = flag(0.0, help=(
        "log a warning for each garbage collection that takes longer, in the API server and in ranks (0: never)"))
    show_time_cost: bool = flag(False, help="log how long each stage of starting took")
    watchdog_timeout: float = flag(300.0, help=(
        "seconds after which a rank whose loop hangs prints its threads' stacks and ends (0: never)"))
    soft_watchdog_timeout: float | None = flag(None, help=(
        "seconds after which a rank whose loop stalls prints its threads' stacks, and continues to wait"))
    enable_nan_detection: bool = flag(False, help=(
        "end requests whose logits are NaN or infinite with an error, instead of answers without meaning"))
    enable_trace: bool = flag(False, help="trace requests to --otlp-traces-endpoint")
    otlp_traces_endpoint: str | None = flag(None, help=(
        "OpenTelemetry collector: HOST:PORT (gRPC) or http://HOST:PORT/v1/traces; turns tracing on (default with "
        "--enable-trace: localhost:4317)"))

    otlp_service_name: str | None = flag(None, help=(
        "service.name of the spans (default: baton- and the server's role)"))

    own_flag_rules: ClassVar[tuple[Rule[ObserveArgs], ...]] = (
        Rule(lambda c: c.export_metrics_to_file != (c.export_metrics_to_file_dir is not None),
             "--export-metrics-to-file and --export-metrics-to-file-dir go together: give both or none."),
        Rule(lambda c: not c.log_requests and (c.log_requests_target or c.log_requests_format != "json"),
             "--log-requests-format and --log-requests-target are for the lines of --log-requests: set it too."),
        Rule(lambda c: c.otlp_service_name is not None and c.traces_to is None,
             "--otlp-service-name names spans: set --otlp-traces-endpoint or --enable-trace too."),
    )

    def __post_init__(self) -> None:
        check_own_rules(self)
        at_least(self, 0, "soft_watchdog_timeout")
        for name in self.extra_labels:
            _check_label("--extra-metric-labels", name)
            if name in self.tokenizer_metrics_allowed_custom_labels:
                raise ConfigError(f"{name} is a label of --extra-metric-labels and of "
                                  "--tokenizer-metrics-allowed-custom-labels; give it another name in one of them.")
        if self.watchdog_timeout < 0:
            raise ConfigError(f"--watchdog-timeout must be 0 or more, not {self.watchdog_timeout}.")
        if not self.gc_warning_threshold_secs >= 0:
            raise ConfigError(f"--gc-warning-threshold-secs must be 0 or more, not {self.gc_warning_threshold_secs:g}.")
        for name in self.tokenizer_metrics_allowed_custom_labels:
            _check_label("--tokenizer-metrics-allowed-custom-labels", name)
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
    def extra_labels(self) -> dict[str, str]:
        """The labels of --extra-metric-labels; raises ConfigError."""
        text = self.extra_metric_labels
        labels = {} if text is None else json_object("--extra-metric-labels", text)
        if not all(isinstance(value, str) for value in labels.values()):
            raise ConfigError("--extra-metric-labels takes texts as the labels' values: {\"team\": \"search\"}.")
        return labels

    @property
    def log_level_of_requests(self) -> int | None:
        return self.log_requests_level if self.log_requests else None

    @property
    def dump_folder(self) -> Path | None:
        return None if self.crash_dump_folder is None else Path(self.crash_dump_folder).expanduser()


def _check_label(flag: str, name: str) -> None:
    """Raises ConfigError for a name that no label of a metric can have."""
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__") or name in _OWN_LABELS:
        raise ConfigError(f"{flag}: {name} cannot be a label; take letters, digits and underscores, and none of "
                          f"{', '.join(sorted(_OWN_LABELS))}.")


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
