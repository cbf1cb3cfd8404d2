"""The metrics, the request log and the traces of a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from ...api.errors import ServingError
from ...config.server import ServerConfig
from ...obs.buckets import Buckets
from ...obs.metrics import ServerMetrics
from .draft_counts import DraftCounts
from .request_log import RequestLog
from .traces import Traces


class Telemetry:
    """The metrics, the request log and the traces of one server; ``traces`` is set where they are exported."""

    def __init__(self, config: ServerConfig):
        speculative = config.speculative
        self._speculates = speculative.speculative_algorithm is not None and config.role.decodes
        self._simulated = speculative.simulated_acceptance is not None
        self.metrics = ServerMetrics(
            config.model_name, config.mode, sglang_names=config.observe.sglang_metrics,
            speculates=self._speculates, simulated=self._simulated,
            buckets=Buckets.of_flags(config.observe))
        self.request_log = RequestLog(config.observe.log_level_of_requests, config.observe.dump_folder)
        self.traces: Traces | None = None
        self.collect_others: Callable[[], Awaitable[None]] | None = None
        """Brings what other processes of the server counted up to date."""

    def count_drafts(self) -> DraftCounts | None:
        """Returns new counts for a request; None on a server that verifies no drafts."""
        return DraftCounts(simulated=self._simulated) if self._speculates else None

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is refused before it reaches the engine, under its error's code."""
        try:
            yield
        except ServingError as error:
            self.metrics.count_outcome(error.code)
            raise
