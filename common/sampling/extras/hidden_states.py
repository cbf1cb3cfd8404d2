"""Hidden states that requests ask for: the rows that have them, and their copies to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...forward.host_copies import Download
from ...request.extras import EXTRAS, Extra
from ...request.step_input import StepInput
from ...request.step_output import RowOutput

HIDDEN_STATES = EXTRAS.register("hidden_states")(Extra(frozenset(("hidden",)), lambda req: req.hidden is not None))


class HiddenRows(NamedTuple):
    """Token rows ``start:stop`` of a step are the next positions of its request ``request``."""

    request: int
    start: int
    stop: int


def hidden_rows(step: StepInput) -> list[HiddenRows]:
    """Returns the rows whose hidden states are requested; counts them as launched, but for drafts, which may not be
    accepted."""
    rows = []
    for index in step.extra_index:
        states = step.reqs[index].hidden
        first, begin = int(step.columns.qo_indptr[index]), int(step.starts[index])
        stop = begin + int(step.q_lens[index])
        if states is not None and stop > states.num_launched:
            start = max(begin, states.num_launched)
            assert start == states.num_launched, "positions were left out"
            rows.append(HiddenRows(index, first + start - begin, first + stop - begin))
            states.num_launched = stop if index not in step.drafts else stop - len(step.drafts[index])
    return rows


class HiddenReport:
    """Hidden states of ``rows``, concatenated in ``states`` [rows, hidden], which the device is computing."""

    def __init__(self, rows: Sequence[HiddenRows], states: torch.Tensor):
        self._rows = rows
        self._download = Download([states.float()])

    def add_to(self, outputs: dict[int, RowOutput]) -> None:
        states = self._download.arrays()[0].astype("<f4", copy=False)
        first = 0
        for row in self._rows:
            count = row.stop - row.start
            outputs.setdefault(row.request, RowOutput()).hidden_states = states[first:first + count].tobytes()
            first += count
