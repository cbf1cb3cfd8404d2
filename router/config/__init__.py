"""The router's configuration: frozen dataclasses by concern, from which one command line is derived."""

from __future__ import annotations

import dataclasses

from ...common.api.errors import ConfigError
from ...common.config.logs import LogArgs
from .admission import AdmissionArgs
from .circuit import CircuitArgs
from .discovery import DiscoveryArgs
from .http import HttpArgs
from .observe import ObserveArgs
from .policy import PolicyArgs
from .retry import RetryArgs
from .security import SecurityArgs
from .workers import HealthArgs, WorkerArgs


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """All of it. A flag lives in the class of its concern; what spans two concerns is checked here."""

    http: HttpArgs = HttpArgs()
    security: SecurityArgs = SecurityArgs()
    workers: WorkerArgs = WorkerArgs()
    policy: PolicyArgs = PolicyArgs()
    retry: RetryArgs = RetryArgs()
    circuit: CircuitArgs = CircuitArgs()
    admission: AdmissionArgs = AdmissionArgs()
    health: HealthArgs = HealthArgs()
    discovery: DiscoveryArgs = DiscoveryArgs()
    observe: ObserveArgs = ObserveArgs()
    logs: LogArgs = LogArgs()

    def __post_init__(self) -> None:
        if self.discovery.service_discovery and self.workers.pd_disaggregation == bool(self.discovery.selector):
            raise ConfigError("--selector is for whole workers; with --pd-disaggregation use --prefill-selector and "
                              "--decode-selector.")
