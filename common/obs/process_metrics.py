"""Standard metrics of the process (``process_*``, ``python_gc_*``) and its build information."""

from __future__ import annotations

import platform
from importlib import metadata

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..version import __version__

_PACKAGES = ("torch", "triton", "flashinfer-python")


class _BuildInfo(Collector):
    """``baton_build_info``: 1, with versions as labels; empty ones are not installed."""

    def __init__(self, component: str):
        versions = {name.partition("-")[0]: _version(name) for name in _PACKAGES}
        self._labels = {"version": __version__, "component": component, "python": platform.python_version(), **versions}

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily("baton_build_info", "Versions of Baton and its packages", labels=[*self._labels])
        family.add_metric([*self._labels.values()], 1.0)
        return [family]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def register_process(registry: CollectorRegistry, component: str) -> None:
    """Adds ``process_*``, ``python_gc_*`` and ``baton_build_info`` to a registry."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_BuildInfo(component))
