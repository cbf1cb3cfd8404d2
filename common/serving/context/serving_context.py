"""The context of a server's request handlers: its configuration, its engine, and the collaborators that share them."""

from __future__ import annotations

from collections.abc import Sequence

from ...api.messages import Generate
from ...config.model import ModelSpec
from ...config.server import ServerConfig
from ...engine_client.client import EngineClient
from ..tool_servers.base import ToolServers
from .api_keys import ApiKeys
from .client_timeouts import ClientTimeouts
from .generation import Generation
from .in_flight import InFlightRequests
from .request_planner import Grammars, RequestPlanner
from .response_store import ResponseStore
from .served_model import ServedModel
from .served_role import ServedRole
from .server_status import ServerStatus
from .sessions import Sessions
from .telemetry import Telemetry


class ServingContext:
    """The collaborators of a server's request handlers, each built from its configuration, its model and its engine."""

    def __init__(self, config: ServerConfig, spec: ModelSpec, client: EngineClient, grammars: Grammars | None = None):
        self.config = config
        self.client = client
        self.model = ServedModel(config, spec)
        self.role = ServedRole(config)
        self.status = ServerStatus(config, self.model, client, self.role)
        self.telemetry = Telemetry(config)
        self.planner = RequestPlanner(config, self.model, self.status, client, self.role, grammars)
        self.keys = ApiKeys.of(config.http.api_key, config.http.admin_api_key)
        self.in_flight = InFlightRequests()
        http = config.http
        self.client_timeouts = ClientTimeouts(http.client_header_timeout_secs, http.client_body_timeout_secs)
        self.sessions = Sessions()
        responses = config.responses
        self.response_store = ResponseStore(responses.stored_entries if config.duties.answers_clients else 0,
                                            responses.response_store_mb * 2**20)
        self.tool_servers: ToolServers = {}

    def generation(self, requests: Sequence[Generate], arrived: float, continued: Sequence[int] = ()) -> Generation:
        """The generations of one HTTP request, observed by this server's telemetry; see Generation."""
        telemetry = self.telemetry
        return Generation(self.client, self.status.serving_tokenizer(), telemetry.request_metrics, requests, arrived,
                          continued,
                          telemetry.request_log if telemetry.request_log.active else None, telemetry.traces,
                          telemetry.count_drafts, lambda: self.model.weight_version, telemetry.time_stats,
                          telemetry.request_export)
