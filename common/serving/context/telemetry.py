"""The metrics, the request log and the traces of a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from ...api.errors import ServingError
from ...config.server import ServerConfig
from ...obs.buckets import Buckets
from ...obs.metrics import ServerMetrics
from .draft_counts import DraftCounts
from .request_export import RequestExport
from .request_log import RequestLog
from .time_stats import TimeStats
from .traces import Traces

CUSTOM_LABELS: ContextVar[str | None] = ContextVar("custom_labels", default=None)
"""Holds the header --tokenizer-metrics-custom-labels-header of the HTTP request that is being handled."""


def _labels(header: str) -> dict[str, str]:
    """The labels that a header gives; none where it is no JSON object of strings, for a request does not fail by it."""
    try:
        return msgspec.json.decode(header, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeError):
        return {}


class Telemetry:
    """The metrics, the request log and the traces of one server; ``traces`` is set where they are exported."""

    def __init__(self, config: ServerConfig):
        speculative = config.speculative
        self._speculates = speculative.speculative_algorithm is not None and config.role.decodes
        self._simulated = speculative.simulated_acceptance is not None
        self.metrics = ServerMetrics(
            config.model_name, config.mode, sglang_names=config.observe.sglang_metrics,
            speculates=self._speculates, simulated=self._simulated, tiered=config.tiers.enable_hierarchical_cache,
            buckets=Buckets.of_flags(config.observe), by_rank=config.observe.enable_metrics_for_all_schedulers,
            custom_labels=config.observe.tokenizer_metrics_allowed_custom_labels,
            extra_labels=config.observe.extra_labels, role=config.duties)
        self.request_log = RequestLog.of(config.observe, config.logs.max_bytes)
        self.request_export = RequestExport.of(config.observe)
        self.time_stats = TimeStats() if config.observe.enable_request_time_stats_logging else None
        self.traces: Traces | None = None
        self.collect_others: Callable[[], Awaitable[None]] | None = None
        """Brings what other processes of the server counted up to date."""

    @property
    def request_metrics(self) -> ServerMetrics:
        """The metrics that count the current HTTP request, by the labels that it gives."""
        given = CUSTOM_LABELS.get()
        return self.metrics if given is None else self.metrics.labelled(_labels(given))

    def count_drafts(self) -> DraftCounts | None:
        """Returns new counts for a request; None on a server that verifies no drafts."""
        return DraftCounts(simulated=self._simulated) if self._speculates else None

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is refused before it reaches the engine, under its error's code."""
        try:
            yield
        except ServingError as error:
            self.request_metrics.count_outcome(error.code)
            raise
