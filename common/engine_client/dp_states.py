"""The states of a server's data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..api.messages import RankTotals, State


def with_rank_totals(replies: Sequence[object]) -> list[State]:
    """The states of the data-parallel ranks, in order, each with RANK_TOTALS summed over its ranks."""
    states = sorted((reply for reply in replies if isinstance(reply, State)), key=lambda state: state.dp_rank)
    for reply in replies:
        if isinstance(reply, RankTotals):
            state = states[reply.dp_rank]
            for name, value in reply.totals.items():
                values = state.counters if name in state.counters else state.gauges
                values[name] = values.get(name, 0.0) + value
    return states
