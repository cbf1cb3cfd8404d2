"""The engine's counters and gauges: their names on the wire, and their help.

The engine reports them in its ``State`` by these names; ``/metrics`` shows counters as ``baton:engine_NAME_total`` and
gauges as ``baton:NAME``, from the server's start on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

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
    ``speculative``: only servers that draft have it."""

    help: str
    exported_by: Callable[[Role], bool] = lambda role: True
    label: str | None = None
    values: tuple[str, ...] = ()
    speculative: bool = False


COUNTERS: dict[str, EngineMetric] = {
    "finished_requests": EngineMetric("Requests that finished in the engine"),
    "failed_requests": EngineMetric("Requests that failed in the engine"),
    "non_finite_requests": EngineMetric("Of the failed requests those whose logits were not finite; counted with "
                                        "--enable-nan-detection"),
    "retracted_requests": EngineMetric("Times that a running request was retracted: its KV pages were freed",
                                       DECODES),
    "preempted_requests": EngineMetric("Times that a running request was preempted by one of a higher priority",
                                       DECODES),
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
    "token_usage": EngineMetric("Share of the KV pool that is in use by running requests, 0 to 1"),
    "swa_token_usage": EngineMetric("As token_usage, of the KV pool of layers with a sliding window"),
    "swa_kv_pages_free": EngineMetric("Free KV pages of layers with a sliding window"),
    "swa_kv_pages_allocated": EngineMetric("KV pages of layers with a sliding window that are allocated to requests"),
    "swa_kv_pages_cached": EngineMetric("KV pages of layers with a sliding window in the prefix cache"),
    "kv_transfers_bootstrapping": EngineMetric("Requests that wait for the other server of their pair", TRANSFERS),
    "kv_transfers_in_flight": EngineMetric("Requests whose last KV pages (decode: any) are in flight", TRANSFERS),
    "kv_transfers_draining": EngineMetric("Failed requests while writes to their KV pages may still arrive", TRANSFERS),
    "kv_writes_queued": EngineMetric("Writes of KV pages that wait for their forward pass or a lease", SENDS),
    "kv_writes_in_flight": EngineMetric("Writes of KV pages in flight", SENDS),
    "kv_prompts_retained": EngineMetric("Prompts retained for another attempt", SENDS),
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
