"""Flags of service discovery in Kubernetes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from ...common.api.errors import ConfigError
from ...common.config.cli import flag
from ...common.config.rules import Rule, check_own_rules

if TYPE_CHECKING:
    from . import RouterConfig

    _RouterRule = Rule[RouterConfig]
else:
    _RouterRule = Rule

_SELECTOR = "KEY=VALUE"


@dataclasses.dataclass(frozen=True)
class DiscoveryArgs:
    service_discovery: bool = flag(False, help="let Kubernetes pods join and leave as workers (needs the extra k8s)")
    selector: tuple[str, ...] = flag(
        (), some=True, metavar=_SELECTOR, help="labels of the pods that are whole workers")
    prefill_selector: tuple[str, ...] = flag(
        (), some=True, metavar=_SELECTOR, help="labels of the pods that are prefill workers")
    decode_selector: tuple[str, ...] = flag(
        (), some=True, metavar=_SELECTOR, help="labels of the pods that are decode workers")
    service_discovery_port: int = flag(80, help="port that discovered workers listen on")
    service_discovery_namespace: str | None = flag(None, help="namespace to watch (default: all, which needs rights)")

    own_flag_rules: ClassVar[tuple[Rule[DiscoveryArgs], ...]] = (
        Rule(lambda c: c.service_discovery and not (c.selector or c.prefill_selector or c.decode_selector),
             "--service-discovery needs --selector, or --prefill-selector and --decode-selector."),
        Rule(lambda c: not c.service_discovery and (c.selector or c.prefill_selector or c.decode_selector),
             "Selectors need --service-discovery."),
    )
    flag_rules: ClassVar[tuple[_RouterRule, ...]] = (
        Rule(lambda c: c.discovery.service_discovery and c.workers.pd_disaggregation == bool(c.discovery.selector),
             "--selector is for whole workers; with --pd-disaggregation use --prefill-selector and --decode-selector."),
    )

    def __post_init__(self) -> None:
        for labels in (self.selector, self.prefill_selector, self.decode_selector):
            for item in split(labels):
                if not item.partition("=")[0] or "=" not in item:
                    raise ConfigError(f"A selector is a list of KEY=VALUE, not {item!r}.")
        if not 0 < self.service_discovery_port < 65536:
            raise ConfigError("--service-discovery-port must be between 1 and 65535.")
        check_own_rules(self)


def split(labels: tuple[str, ...]) -> list[str]:
    """``("a=b c=d",)``, as YAML lists of arguments tend to have it, and ``("a=b", "c=d")`` alike."""
    return [item for label in labels for item in label.split()]
