"""The rows of one step in every attention group, as the exchanges between the groups read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step's ``counts`` of rows by attention group, equal on all ranks, and what follows from them; made once a
    step. ``own`` rows are those of this rank's group; they begin at ``first`` of the ``total`` rows of all groups.

    ``padded``: the groups' rows are padded to the largest group. ``token_rows`` are then the indices of the rows
    among the padded ones; None: no row is padding. ``decode_rows``: the rows of every group in a step in which all
    decode equally many; else 0.

    ``live`` [rows of all groups] is 0 for rows that only pad the step; None: all are tokens.
    """

    counts: tuple[int, ...]
    own: int
    first: int
    total: int
    largest: int
    padded: bool
    token_rows: torch.Tensor | None = None
    decode_rows: int = 0
    live: torch.Tensor | None = None

    @staticmethod
    def of_groups(counts: Sequence[int], rank: int, device: torch.device, *, all_decode: bool = False) -> StepRows:
        """Returns the rows of a step for the attention group ``rank``. ``all_decode``: every group decodes."""
        largest, total, padded = max(counts), sum(counts), pads_groups(counts)
        token_rows = None
        if padded and total < largest * len(counts):
            indices = [torch.arange(count) + i * largest for i, count in enumerate(counts)]
            token_rows = torch.cat(indices).to(device)
        decode_rows = counts[0] if all_decode and len(set(counts)) == 1 else 0
        return StepRows(tuple(counts), counts[rank], sum(counts[:rank]), total, largest, padded, token_rows,
                        decode_rows)

    def with_live(self, live: torch.Tensor | None) -> StepRows:
        """Returns these rows, of which ``live`` are tokens."""
        return self if live is None else dataclasses.replace(self, live=live)


def pads_groups(counts: Sequence[int]) -> bool:
    """Returns whether the groups' rows are padded to the largest group: where an all-gather of ``groups * largest``
    rows moves less than an all-reduce of all rows, which moves twice their number."""
    return max(counts) * len(counts) <= 2 * sum(counts)


ONE_GROUP = StepRows((), 0, 0, 0, 0, True)
"""The rows of any step where there is one attention group, with which nothing is exchanged."""
