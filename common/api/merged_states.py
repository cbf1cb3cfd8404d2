"""Merges the states of a server's data-parallel ranks into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .messages import State


def merge_states(states: Sequence[State]) -> State:
    """Sums of pages, requests, counters and queue lengths, and the mean usage of the pools, which are of one size, and
    of drafts."""
    if len(states) == 1:
        return states[0]
    counters: Counter[str] = Counter()
    for state in states:
        counters.update(state.counters)
    names = states[0].gauges.keys()
    return State(
        seq=states[0].seq, page_size=states[0].page_size,
        total_pages=sum(state.total_pages for state in states), free_pages=sum(state.free_pages for state in states),
        held_pages=sum(state.held_pages for state in states), cached_pages=sum(state.cached_pages for state in states),
        num_running=sum(state.num_running for state in states), num_waiting=sum(state.num_waiting for state in states),
        num_transferring=sum(state.num_transferring for state in states), counters=dict(counters),
        gauges={name: sum(state.gauges[name] for state in states) / (len(states) if _is_mean(name) else 1)
                for name in names},
        model=states[0].model, pair_key=states[0].pair_key)


def _is_mean(gauge: str) -> bool:
    return gauge.endswith("token_usage") or gauge.startswith(("spec_", "expert_"))
