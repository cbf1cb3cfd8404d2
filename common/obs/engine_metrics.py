"""The engine's counters and gauges: their names on the wire, and what each counts.

The engine reports them in its ``State`` by these names; ``/metrics`` shows counters as ``baton:engine_NAME_total`` and
gauges as ``baton:NAME``, from the server's start on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..api.errors import ERROR_CODES

Mode = Literal["null", "prefill", "decode"]
PAIRS: tuple[Mode, ...] = ("prefill", "decode")
ALL: tuple[Mode, ...] = ("null", *PAIRS)

BREAKAGES = ("silent", "connection_lost", "ended", "write_failed", "damaged", "mismatch", "refused", "unreachable",
             "shutdown", "weights", "other_rank", "peer")
"""Causes of a ``TransferFailed``; ``peer``: the other server counts the cause itself."""


class EngineMetric(NamedTuple):
    """``label``: its values stand behind the name in the engine's report (``kv_transfers_broken_silent``); ``values``
    are those that are shown as 0 before they occur."""

    help: str
    modes: tuple[Mode, ...] = ALL
    label: str | None = None
    values: tuple[str, ...] = ()


COUNTERS: dict[str, EngineMetric] = {
    "finished_requests": EngineMetric("Requests that ended in the engine as they should"),
    "failed_requests": EngineMetric("Requests that ended in the engine with an error"),
    "retracted_requests": EngineMetric("Times that a running request gave its KV pages back and waits anew",
                                       ("null", "decode")),
    "preempted_requests": EngineMetric("Times that a more urgent request took the place of a running one",
                                       ("null", "decode")),
    "swapped_out_requests": EngineMetric("Retracted requests whose KV cache went to host memory", ("null", "decode")),
    "reused_prompts": EngineMetric("Prompts sent again for another attempt, and not computed again", ("prefill",)),
    "kv_bytes_sent": EngineMetric("Bytes of KV pages written to decode servers, by all ranks", ("prefill",)),
    "kv_bytes_received": EngineMetric("Bytes of KV pages taken over from prefill servers, by all ranks", ("decode",)),
    "kv_transfers_done": EngineMetric("KV transfers completed", PAIRS),
    "kv_transfer_seconds": EngineMetric("Seconds that completed KV transfers took, the prompt's computing included",
                                        PAIRS),
    "kv_transfer_exposed_seconds": EngineMetric(
        "Seconds between a prompt's last layer and the arrival of its last KV page", ("prefill",)),
    "kv_write_seconds": EngineMetric("Seconds with writes of KV pages under way", ("prefill",)),
    "kv_messages_dropped": EngineMetric("Messages of peers that restarted, or that came too late", PAIRS),
    "kv_transfers_failed": EngineMetric("KV transfers that failed, by the error's code", PAIRS, "code", ERROR_CODES),
    "kv_transfers_broken": EngineMetric("KV transfers that broke, by cause", PAIRS, "cause", BREAKAGES),
}
GAUGES: dict[str, EngineMetric] = {
    "token_usage": EngineMetric("Share of the KV pool that a new request could not have, 0 to 1"),
    "kv_transfers_meeting": EngineMetric("Requests that wait for their other half", PAIRS),
    "kv_transfers_moving": EngineMetric("Requests whose last KV pages (decode: any) are on their way", PAIRS),
    "kv_transfers_draining": EngineMetric("Failed requests while writes to their KV pages may still land", PAIRS),
    "kv_writes_queued": EngineMetric("Writes of KV pages that wait for their forward pass or a lease", ("prefill",)),
    "kv_writes_in_flight": EngineMetric("Writes of KV pages under way", ("prefill",)),
    "kv_prompts_kept": EngineMetric("Prompts kept for another attempt", ("prefill",)),
}
COUNTED_BY_API_SERVER = frozenset(("prompt_tokens", "generation_tokens", "cached_tokens"))
"""The API server counts these at the moment a request ends; the engine's own counts would double them."""


def about(table: Mapping[str, EngineMetric], name: str) -> EngineMetric:
    """A metric of the table. One that is missing there (a test looks for it) is shown all the same."""
    return table.get(name) or EngineMetric(name.replace("_", " ").capitalize())


def family_of(name: str) -> tuple[str, str | None]:
    """The counter's family and the value of its label, of a name in the engine's report."""
    if name in COUNTERS:
        return name, None
    for family, metric in COUNTERS.items():
        if metric.label is not None and name.startswith(f"{family}_"):
            return family, name[len(family) + 1:]
    return name, None
