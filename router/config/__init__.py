"""The router's configuration: frozen dataclasses by concern, from which one command line is derived."""

from __future__ import annotations

import dataclasses

from ...common.config.logs import LogArgs
from ...common.config.rules import check_rules
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
    """All of it. A flag lives in the class of its concern, and so do the rules on what it does not combine with."""

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
        check_rules(self)
