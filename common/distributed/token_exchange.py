"""Gathers the tokens of data-parallel attention ranks for what all ranks compute, and scatters the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch.nn.functional import pad

from .all_to_all import AllToAllExchange
from .deferred_reduce import DeferredRows, DeferredSum, MaybeDeferred
from .low_latency import GatheredTokens, LowLatencyExchange
from .step_rows import ONE_GROUP, StepRows
from .tp import TPGroup

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Row-wise computation on rows that are equal on all ranks: ``[N, a] -> [N, b]``."""
ComputePair = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""The same, with its result as a sum of two tensors, the second of which may be None."""


class TokenExchange:
    """Row exchange between the attention groups of ``dp``; ``dp`` and ``attn_tp`` are Parallel's.

    It has communicators only: each call takes the step's rows, which ``step`` makes, so that several steps may be in
    flight.

    A step pads the groups' rows to the largest group where that moves fewer rows than a sum over zero-filled copies of
    all: an all-gather moves ``ranks * largest`` rows, an all-reduce twice the total. So a long prompt on one rank does
    not pad the ranks that decode to its length.
    """

    def __init__(self, dp: TPGroup, attn_tp: TPGroup | None = None, *, low_latency: bool = False,
                 all_to_all: bool = False):
        self.low_latency = LowLatencyExchange(dp) if low_latency else None  # of decode steps; None: as prefill steps
        self.all_to_all = AllToAllExchange(dp) if all_to_all else None  # None: experts see the rows of all groups
        self._dp = dp
        self._attn_tp = attn_tp or TPGroup()

    @property
    def spans_dp(self) -> bool:
        """True if there is more than one attention group."""
        return self._dp.size > 1

    @property
    def dp_size(self) -> int:
        return self._dp.size

    def step(self, counts: Sequence[int], *, all_decode: bool = False) -> StepRows:
        """Returns the rows of a step with ``counts`` of each attention group, equal on all ranks. ``all_decode``: every
        group decodes."""
        if not self.spans_dp:
            return ONE_GROUP
        assert len(counts) == self._dp.size
        return StepRows.of_groups(counts, self._dp.rank, self._dp.device, all_decode=all_decode)

    def mark_live(self, rows: StepRows, live: torch.Tensor) -> StepRows:
        """Returns ``rows`` of which this rank's [own] bool ``live`` are tokens, gathered in a low-latency decode step;
        in others all count as tokens. All ranks call it, before the first layer."""
        return rows if self.low_latency is None else rows.with_live(self.low_latency.gather_live(live, rows))

    def apply(self, compute: Compute, x: torch.Tensor | GatheredTokens, rows: StepRows) -> torch.Tensor:
        """Computes the rows of all groups together, and returns those of this group's ``x`` [own, a]."""
        if isinstance(x, GatheredTokens):
            return compute(x.rows).chunk(self._dp.size)[self._dp.rank]
        if not self.spans_dp:
            return compute(x)
        return _local_rows(self._apply_gathered(compute, x, rows), rows)

    def apply_columns(self, compute: Compute, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """``apply`` where every rank computes other columns: ``compute`` returns ``[N, c]``, the result is
        ``[own, ranks * c]``. For attention groups of one rank: none needs the others' rows."""
        columns = self._apply_gathered(compute, x, rows)
        own, size, comm = rows.own, self._dp.size, self._dp.symm_comm
        if comm is not None and comm.can_all_gather(columns):  # fast enough that gathering all rows costs less
            return _local_rows(self._dp.all_gather_last_dim(columns), rows)
        parts = self._dp.all_to_all_rows(columns, list(rows.counts), [own] * size)
        return parts.view(size, own, columns.shape[1]).transpose(0, 1).flatten(1)

    def _apply_gathered(self, compute: Compute, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Computes the rows of all groups; nothing is gathered where no group has any."""
        return compute(self.gather(x, rows) if rows.total else x)

    def apply_partial(self, partial: Compute, partial_pair: ComputePair, x: torch.Tensor | GatheredTokens,
                      rows: StepRows) -> MaybeDeferred:
        """``apply`` where ``partial`` is this rank's summand of the result, to be summed over all ranks of the engine.

        Only the group's own rows are summed (reduce-scatter): half the traffic of an all-reduce of all rows. The rest
        of the sum, within the group, is deferred to the norm that follows. For rows that the norm before has gathered
        (GatheredTokens) the whole sum is, of ``partial_pair`` in place of ``partial``."""
        if isinstance(x, GatheredTokens):
            return DeferredRows(*partial_pair(x.rows), self._dp)
        if not self.spans_dp:
            return self._defer_tp_sum(partial(x))
        y = partial(self.gather(x, rows))
        if rows.padded:
            mine = self._dp.reduce_scatter_rows(self._pad_groups(y, rows))[:rows.own]
        else:
            mine = _local_rows(self._dp.all_reduce(y), rows)
        return self._defer_tp_sum(mine)

    def apply_partial_overlapped(self, partial: Compute, x: torch.Tensor,
                                 rows: StepRows) -> Generator[None, None, MaybeDeferred]:
        """``apply_partial`` of padded rows; yields while a collective runs, so that what is enqueued meanwhile overlaps
        with it."""
        assert rows.padded
        gathered = self._dp.start_all_gather(_pad_local(x, rows))
        yield
        padded = gathered.rows()
        y = partial(padded if rows.token_rows is None else padded[rows.token_rows])
        scattered = self._dp.start_reduce_scatter(self._pad_groups(y, rows))
        del gathered, padded, y  # memory for the other micro-batch's
        yield
        return self._defer_tp_sum(scattered.rows()[:rows.own])

    def _pad_groups(self, y: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Pads each group's rows of the rows of all to the largest group."""
        if rows.token_rows is None:
            return y
        padded = y.new_zeros(rows.largest * self._dp.size, y.shape[1])
        padded[rows.token_rows] = y
        return padded

    def _defer_tp_sum(self, part: torch.Tensor) -> MaybeDeferred:
        return DeferredSum(part, self._attn_tp) if self._attn_tp.size > 1 else part

    def gather(self, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Gathers ``[own, a]`` to the rows of all groups, in the order of their ranks."""
        assert x.shape[0] == rows.own, f"{x.shape[0]} rows, but the step has {rows.own}"
        if rows.padded:
            padded = self._dp.all_gather_rows(_pad_local(x, rows))
            return padded if rows.token_rows is None else padded[rows.token_rows]
        joined = x.new_zeros(rows.total, x.shape[1])
        joined[rows.first:rows.first + rows.own] = x
        return self._dp.all_reduce(joined)


def _local_rows(y: torch.Tensor, rows: StepRows) -> torch.Tensor:
    """Returns this group's rows of the rows of all."""
    return y[rows.first:rows.first + rows.own]


def _pad_local(x: torch.Tensor, rows: StepRows) -> torch.Tensor:
    """Pads this group's rows to the largest group."""
    missing = rows.largest - x.shape[0]
    return pad(x, (0, 0, 0, missing)) if missing else x  # pad copies in any case
