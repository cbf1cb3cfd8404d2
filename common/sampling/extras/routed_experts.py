"""Experts to which tokens were routed, where requests ask for them: the rows that have them, and their copies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np
import torch

from ...forward.host_copies import Download
from ...request.extras import EXTRAS, Extra
from ...request.position_rows import ROUTED_EXPERTS
from ...request.step_input import StepInput
from ...request.step_output import RowOutput
from .hidden_states import RequestRows, rows_of_positions

EXTRAS.register("routed_experts")(Extra(frozenset(("routed",)), lambda req: req.routed is not None))


class ChosenExperts(Protocol):
    """The experts that the layers chose in the last step."""

    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Returns int32 ``[n, layers, top_k]`` of these token rows, in order of the device's stream."""


def routed_rows(step: StepInput) -> list[RequestRows]:
    """Returns the rows whose experts are requested; counts them as launched."""
    return rows_of_positions(step, attrgetter("routed"))


class RoutedReport:
    """Experts of ``rows``, which the device is computing."""

    def __init__(self, rows: Sequence[RequestRows], chosen: ChosenExperts):
        self._rows = rows
        self._download = Download([chosen.of(np.concatenate([np.arange(row.start, row.stop) for row in rows]))])

    def add_to(self, outputs: dict[int, RowOutput]) -> None:
        chosen = self._download.arrays()[0].astype(ROUTED_EXPERTS)
        first = 0
        for row in self._rows:
            count = row.stop - row.start
            outputs.setdefault(row.request, RowOutput()).routed_experts = chosen[first:first + count].tobytes()
            first += count
