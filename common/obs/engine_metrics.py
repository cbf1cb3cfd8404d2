"""The engine's counters and gauges: their names on the wire, and their help.

The engine reports them in its ``State`` by these names; ``/metrics`` shows counters as ``baton:engine_NAME_total`` and
gauges as ``baton:NAME``, from the server's start on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from ..api.errors import ERROR_CODES
from ..config.roles import Role

TRANSFERS, SENDS = attrgetter("transfers_kv"), attrgetter("sends_kv")
RECEIVES, DECODES = attrgetter("receives_kv"), attrgetter("decodes")

BREAKAGES = ("silent", "connection_lost", "ended", "write_failed", "damaged", "mismatch", "refused", "unreachable",
             "shutdown", "weights", "other_rank", "peer")
"""Causes of a ``TransferFailed``; ``peer``: the other server counts the cause itself."""


class EngineMetric(NamedTuple):
    """``exported_by``: true for the roles whose servers have it. ``label``: its values are appended to the name in the
    engine's report (``kv_transfers_broken_silent``); ``values`` are those that are exported as 0 before they occur.
    ``speculative``: only servers that draft have it; ``tiered``: those with --enable-hierarchical-cache."""

    help: str
    exported_by: Callable[[Role], bool] = lambda role: True
    label: str | None = None
    values: tuple[str, ...] = ()
    speculative: bool = False
    tiered: bool = False


def _of_tiers(help: str, **facts: Any) -> EngineMetric:
    return EngineMetric(help, tiered=True, **facts)


COUNTERS: dict[str, EngineMetric] = {
    "finished_requests": EngineMetric("Requests that finished in the engine"),
    "failed_requests": EngineMetric("Requests that failed in the engine"),
    "non_finite_requests": EngineMetric("Of the failed requests those whose logits were not finite; counted with "
                                        "--enable-nan-detection"),
    "retracted_requests": EngineMetric("Times that a running request was retracted: its KV pages were freed",
                                       DECODES),
    "preempted_requests": EngineMetric("Times that a running request was preempted by one of a higher priority",
                                       DECODES),
    "role_switches": EngineMetric("Changes of the server's role by /switch_role"),
    "swapped_out_requests": EngineMetric("Retracted requests whose KV was swapped to host memory", DECODES),
    "reused_prompts": EngineMetric("Retained prompts that were sent again for another attempt", SENDS),
    "kv_bytes_sent": EngineMetric("Bytes of KV pages written to decode servers, by all ranks", SENDS),
    "kv_bytes_received": EngineMetric("Bytes of KV pages received from prefill servers, by all ranks", RECEIVES),
    "kv_transfers_done": EngineMetric("KV transfers completed", TRANSFERS),
    "kv_transfer_seconds": EngineMetric("Seconds that completed KV transfers took, the prefill included",
                                        TRANSFERS),
    "kv_transfer_exposed_seconds": EngineMetric(
        "Of these seconds, those between a prompt's last layer and the arrival of its last KV page: what computing did "
        "not hide", SENDS),
    "kv_write_seconds": EngineMetric("Seconds with writes of KV pages in flight: the bytes sent over these are the "
                                     "transfer rate", SENDS),
    "kv_messages_dropped": EngineMetric("Stale messages: of peers that restarted, or that came too late", TRANSFERS),
    "kv_transfers_failed": EngineMetric("KV transfers that failed, by the error's code", TRANSFERS, "code",
                                        ERROR_CODES),
    "spec_verified_drafts": EngineMetric("Times that drafts of a request were verified", DECODES, speculative=True),
    "spec_draft_tokens": EngineMetric("Drafted tokens that were verified", DECODES, speculative=True),
    "spec_accepted_tokens": EngineMetric("Of the drafted tokens those that were accepted", DECODES, speculative=True),
    "spec_accepted_tokens_at": EngineMetric("Accepted drafted tokens by their position, from 1", DECODES,
                                            "position", ("1",), speculative=True),
    "kv_transfers_broken": EngineMetric("Of the failed KV transfers those that broke, by cause; peer: the other "
                                        "server counts the cause itself", TRANSFERS, "cause", BREAKAGES),
    "tier_pages_stored": _of_tiers("KV pages copied to host memory"),
    "tier_pages_loaded": _of_tiers("KV pages copied from host memory to the device, for prompts that found them"),
    "tier_pages_loaded_from_storage": _of_tiers("Of the loaded pages those that had come from the storage"),
    "tier_pages_computed": _of_tiers("KV pages that host memory had, and that were cheaper to compute"),
    "tier_pages_evicted": _of_tiers("KV pages that left host memory to make room"),
    "tier_bytes_stored": _of_tiers("Bytes of KV pages copied to host memory by the first rank"),
    "tier_bytes_loaded": _of_tiers("Bytes of KV pages copied from host memory by the first rank"),
    "prefetches": _of_tiers("Requests whose pages the storage was asked for"),
    "prefetched_pages": _of_tiers("KV pages read from the storage into host memory"),
    "prefetches_refused": _of_tiers("Prefetches that were not begun because computing was cheaper"),
    "prefetch_wait_seconds": _of_tiers("Seconds that requests waited for their prefetches"),
    "storage_pages_read": _of_tiers("KV pages that the first rank read from the storage"),
    "storage_pages_written": _of_tiers("KV pages that the first rank wrote to the storage"),
    "storage_bytes_read": _of_tiers("Bytes that all ranks read from the storage"),
    "storage_bytes_written": _of_tiers("Bytes that all ranks wrote to the storage"),
    "storage_read_seconds": _of_tiers("Seconds in reads of the storage, summed over threads and ranks"),
    "storage_write_seconds": _of_tiers("Seconds in writes to the storage, summed over threads and ranks"),
    "storage_pages_dropped": _of_tiers("KV pages that were not written: the queue was full, or they had left host "
                                       "memory before"),
    "storage_objects_evicted": _of_tiers("Objects that this server removed from the storage to make room"),
    "storage_times_aside": _of_tiers("Times that the storage was put aside because it failed or hung"),
    "storage_errors": _of_tiers("Objects of the storage that were damaged or another model's, and failed calls",
                                label="kind", values=("corrupt", "foreign", "read", "write", "query")),
}
GAUGES: dict[str, EngineMetric] = {
    "spec_accept_length": EngineMetric("Tokens that a step with drafts yields a request, over the last steps", DECODES,
                                       speculative=True),
    "spec_accept_rate": EngineMetric("Share of drafted tokens that are accepted, over the last steps", DECODES,
                                     speculative=True),
    "spec_num_steps": EngineMetric("Passes of the drafter in a step, at most", DECODES, speculative=True),
    "spec_num_draft_tokens": EngineMetric("Rows of a request in a step at present: its newest token and its drafts",
                                          DECODES, speculative=True),
    "expert_utilization": EngineMetric(
        "Tokens that ranks have for their experts over those of the busiest rank, 1 is even: the mean of the layers, "
        "over the last 100 steps, with --enable-expert-distribution-metrics"),
    "hicache_host_used_tokens": EngineMetric("Tokens whose KV pages are in host memory, with "
                                             "--enable-hierarchical-cache"),
    "hicache_host_total_tokens": EngineMetric("Tokens whose KV pages fit into host memory"),
    "token_usage": EngineMetric("Share of the KV pool that is in use by running requests, 0 to 1"),
    "swa_token_usage": EngineMetric("As token_usage, of the KV pool of layers with a sliding window"),
    "swa_kv_pages_free": EngineMetric("Free KV pages of layers with a sliding window"),
    "swa_kv_pages_allocated": EngineMetric("KV pages of layers with a sliding window that are allocated to requests"),
    "swa_kv_pages_cached": EngineMetric("KV pages of layers with a sliding window in the prefix cache"),
    "mamba_token_usage": EngineMetric("As token_usage, of the pool of states of hybrid models"),
    "mamba_kv_pages_free": EngineMetric("Free states of hybrid models"),
    "mamba_kv_pages_allocated": EngineMetric("States of hybrid models that are allocated to requests"),
    "mamba_kv_pages_cached": EngineMetric("States of hybrid models in the prefix cache"),
    "kv_transfers_bootstrapping": EngineMetric("Requests that wait for the other server of their pair", TRANSFERS),
    "kv_transfers_in_flight": EngineMetric("Requests whose last KV pages (decode: any) are in flight", TRANSFERS),
    "kv_transfers_draining": EngineMetric("Failed requests while writes to their KV pages may still arrive", TRANSFERS),
    "kv_writes_queued": EngineMetric("Writes of KV pages that wait for their forward pass or a lease", SENDS),
    "kv_writes_in_flight": EngineMetric("Writes of KV pages in flight", SENDS),
    "kv_prompts_retained": EngineMetric("Prompts retained for another attempt", SENDS),
    "tier_host_page_cost": _of_tiers("Time to load a KV page from host memory, as a share of that to compute it; once "
                                     "both were measured"),
    "tier_storage_page_cost": _of_tiers("Time to load a KV page from the storage, as a share of that to compute it; "
                                        "once both were measured"),
    "storage_pages_queued": _of_tiers("KV pages that wait to be written to the storage, of each rank its part"),
    "storage_healthy": _of_tiers("1 while pages are read from the storage, 0 while it is put aside"),
}
COUNTED_BY_API_SERVER = frozenset(("prompt_tokens", "generation_tokens", "cached_tokens"))
"""Counters that the API server counts when a request ends; the engine's own counts would double them."""


def about(table: Mapping[str, EngineMetric], name: str) -> EngineMetric:
    """A metric of the table. One that is missing there (a test checks for it) is exported all the same."""
    return table.get(name) or EngineMetric(name.replace("_", " ").capitalize())


def family_of(name: str) -> tuple[str, str | None]:
    """The family and the label's value of a counter's name in the engine's report."""
    if name in COUNTERS:
        return name, None
    for family, metric in COUNTERS.items():
        if metric.label is not None and name.startswith(f"{family}_"):
            return family, name[len(family) + 1:]
    return name, None
