"""The metrics, the request log and the traces of a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...api.errors import ServingError
from ...config.server import ServerConfig
from ...obs.metrics import ServerMetrics
from .request_log import RequestLog
from .traces import Traces


class Telemetry:
    """The metrics, the request log and the traces of one server; ``traces`` is set where they are exported."""

    def __init__(self, config: ServerConfig):
        speculative = config.speculative
        self.metrics = ServerMetrics(
            config.model_name, config.mode, sglang_names=config.observe.sglang_metrics,
            speculates=speculative.speculative_algorithm is not None and config.role.decodes,
            simulated=speculative.simulated_acceptance is not None)
        self.request_log = RequestLog(config.observe.log_level_of_requests, config.observe.dump_folder)
        self.traces: Traces | None = None

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is refused before it reaches the engine, under its error's code."""
        try:
            yield
        except ServingError as error:
            self.metrics.count_outcome(error.code)
            raise
