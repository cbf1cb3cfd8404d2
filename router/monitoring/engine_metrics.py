"""``/engine_metrics``: the metrics of all servers on one page, each sample with the address of its server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "worker_addr"


class _Merged(Collector):
    """Joins metric families of the same name."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterable[Metric]:
        return self._families.values()

    def add(self, text: str, url: str) -> None:
        """Adds a server's page; raises ValueError where it is none."""
        families = list(text_string_to_metric_families(text))
        for family in families:
            merged = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, LABEL: url}, sample.value)


def merge(pages: Mapping[str, bytes]) -> bytes:
    """Merges pages, by the URL of their server, into one; unreadable ones are left out."""
    merged = _Merged()
    for url, page in pages.items():
        try:
            merged.add(page.decode(), url)
        except (ValueError, KeyError, IndexError):  # It is no metrics page.
            continue
    registry = CollectorRegistry(auto_describe=False)
    registry.register(merged)
    return generate_latest(registry)
