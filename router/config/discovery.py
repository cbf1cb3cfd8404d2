"""Flags of service discovery in Kubernetes."""

from __future__ import annotations

import dataclasses

from ...common.api.errors import ConfigError
from ...common.config.cli import flag

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

    def __post_init__(self) -> None:
        for labels in (self.selector, self.prefill_selector, self.decode_selector):
            for item in split(labels):
                if not item.partition("=")[0] or "=" not in item:
                    raise ConfigError(f"A selector is a list of KEY=VALUE, not {item!r}.")
        if not 0 < self.service_discovery_port < 65536:
            raise ConfigError("--service-discovery-port must be between 1 and 65535.")
        if self.service_discovery and not (self.selector or self.prefill_selector or self.decode_selector):
            raise ConfigError("--service-discovery needs --selector, or --prefill-selector and --decode-selector.")
        if not self.service_discovery and (self.selector or self.prefill_selector or self.decode_selector):
            raise ConfigError("Selectors need --service-discovery.")


def split(labels: tuple[str, ...]) -> list[str]:
    """``("a=b c=d",)``, as YAML lists of arguments tend to have it, and ``("a=b", "c=d")`` alike."""
    return [item for label in labels for item in label.split()]
