"""Hidden states that requests ask for: the rows that have them, and their copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from ...forward.host_copies import Download
from ...request.extras import EXTRAS, Extra
from ...request.position_rows import PositionRows
from ...request.req import Req
from ...request.step_input import StepInput
from ...request.step_output import RowOutput

HIDDEN_STATES = EXTRAS.register("hidden_states")(Extra(frozenset(("hidden",)), lambda req: req.hidden is not None))


class RequestRows(NamedTuple):
    """Token rows ``start:stop`` of a step are the next positions of its request ``request``."""

    request: int
    start: int
    stop: int


def hidden_rows(step: StepInput) -> list[RequestRows]:
    """Returns the rows whose hidden states are requested; see ``rows_of_positions``."""
    return rows_of_positions(step, attrgetter("hidden"))


def rows_of_positions(step: StepInput, rows_of: Callable[[Req], PositionRows | None]) -> list[RequestRows]:
    """Returns the rows of positions that requests ask for and do not have yet; counts them as launched, but for drafts,
    which may not be accepted."""
    rows = []
    for index in step.extra_index:
        states = rows_of(step.reqs[index])
        first, begin = int(step.columns.qo_indptr[index]), int(step.starts[index])
        stop = begin + int(step.q_lens[index])
        if states is not None and stop > states.num_launched:
            start = max(begin, states.num_launched)
            assert start == states.num_launched, "positions were left out"
            rows.append(RequestRows(index, first + start - begin, first + stop - begin))
            states.num_launched = stop if index not in step.drafts else stop - len(step.drafts[index])
    return rows


class HiddenReport:
    """Hidden states of ``rows``, concatenated in ``states`` [rows, hidden], which the device is computing."""

    def __init__(self, rows: Sequence[RequestRows], states: torch.Tensor):
        self._rows = rows
        self._download = Download([states.float()])

    def add_to(self, outputs: dict[int, RowOutput]) -> None:
        states = self._download.arrays()[0].astype("<f4", copy=False)
        first = 0
        for row in self._rows:
            count = row.stop - row.start
            outputs.setdefault(row.request, RowOutput()).hidden_states = states[first:first + count].tobytes()
            first += count
