"""Gathers the tokens of data-parallel attention ranks for what all ranks compute, and scatters the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch.nn.functional import pad

from .all_to_all import AllToAllExchange
from .deferred_reduce import DeferredRows, DeferredSum, MaybeDeferred
from .low_latency import GatheredTokens, LowLatencyExchange
from .tp import TPGroup

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Row-wise computation on rows that are equal on all ranks: ``[N, a] -> [N, b]``."""
ComputePair = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""The same, with its result as a sum of two tensors, the second of which may be None."""


class TokenExchange:
    """Row exchange between the attention groups of ``dp``; ``dp`` and ``attn_tp`` are Parallel's.

    Models keep the exchange; ``begin_step`` sets the number of rows of every attention group for one step.

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
        self._counts: list[int] = [0] * dp.size
        self._padded = True
        self._token_rows: torch.Tensor | None = None  # indices of tokens among the padded rows; None: all are tokens

    @property
    def spans_dp(self) -> bool:
        """True if there is more than one attention group."""
        return self._dp.size > 1

    @property
    def dp_size(self) -> int:
        return self._dp.size

    def begin_step(self, counts: Sequence[int], *, all_decode: bool = False) -> None:
        """Sets the rows of each attention group in the calls that follow, equal on all ranks. ``all_decode``: every
        group decodes."""
        if not self.spans_dp:
            return
        assert len(counts) == self._dp.size
        if self.low_latency is not None:
            self.low_latency.begin_step(counts if all_decode else ())
        if self.all_to_all is not None:
            self.all_to_all.begin_step(counts)
        self._counts = list(counts)
        largest, total = max(counts), sum(counts)
        self._padded = largest * len(counts) <= 2 * total
        self._token_rows = None
        if self._padded and total < largest * len(counts):
            indices = [torch.arange(count) + i * largest for i, count in enumerate(counts)]
            self._token_rows = torch.cat(indices).to(self._dp.device)

    def apply(self, compute: Compute, x: torch.Tensor | GatheredTokens) -> torch.Tensor:
        """Computes the rows of all groups together, and returns those of this group's ``x`` [own, a]."""
        if isinstance(x, GatheredTokens):
            return compute(x.rows).chunk(self._dp.size)[self._dp.rank]
        if not self.spans_dp:
            return compute(x)
        return self._local_rows(self._apply_gathered(compute, x))

    def apply_columns(self, compute: Compute, x: torch.Tensor) -> torch.Tensor:
        """``apply`` where every rank computes other columns: ``compute`` returns ``[N, c]``, the result is
        ``[own, ranks * c]``. For attention groups of one rank: none needs the others' rows."""
        columns = self._apply_gathered(compute, x)
        own, size, comm = self._counts[self._dp.rank], self._dp.size, self._dp.symm_comm
        if comm is not None and comm.can_all_gather(columns):  # fast enough that gathering all rows costs less
            return self._local_rows(self._dp.all_gather_last_dim(columns))
        parts = self._dp.all_to_all_rows(columns, self._counts, [own] * size)
        return parts.view(size, own, columns.shape[1]).transpose(0, 1).flatten(1)

    def _apply_gathered(self, compute: Compute, x: torch.Tensor) -> torch.Tensor:
        """Computes the rows of all groups; nothing is gathered where no group has any."""
        return compute(self.gather(x) if sum(self._counts) else x)

    def _local_rows(self, y: torch.Tensor) -> torch.Tensor:
        """Returns this group's rows of the rows of all."""
        first = sum(self._counts[:self._dp.rank])
        return y[first:first + self._counts[self._dp.rank]]

    def apply_partial(self, partial: Compute, partial_pair: ComputePair,
                      x: torch.Tensor | GatheredTokens) -> MaybeDeferred:
        """``apply`` where ``partial`` is this rank's summand of the result, to be summed over all ranks of the engine.

        Only the group's own rows are summed (reduce-scatter): half the traffic of an all-reduce of all rows. The rest
        of the sum, within the group, is deferred to the norm that follows. For rows that the norm before has gathered
        (GatheredTokens) the whole sum is, of ``partial_pair`` in place of ``partial``."""
        if isinstance(x, GatheredTokens):
            return DeferredRows(*partial_pair(x.rows), self._dp)
        if not self.spans_dp:
            return self._defer_tp_sum(partial(x))
        y, own = partial(self.gather(x)), self._counts[self._dp.rank]
        if self._padded:
            mine = self._dp.reduce_scatter_rows(self._pad_groups(y))[:own]
        else:
            first = sum(self._counts[:self._dp.rank])
            mine = self._dp.all_reduce(y)[first:first + own]
        return self._defer_tp_sum(mine)

    def apply_partial_overlapped(self, partial: Compute, x: torch.Tensor) -> Generator[None, None, MaybeDeferred]:
        """``apply_partial`` of padded rows; yields while a collective runs, so that what is enqueued meanwhile overlaps
        with it."""
        assert self._padded
        gathered = self._dp.start_all_gather(self._pad_local(x))
        yield
        rows = gathered.rows()
        y = partial(rows if self._token_rows is None else rows[self._token_rows])
        scattered = self._dp.start_reduce_scatter(self._pad_groups(y))
        del gathered, rows, y  # memory for the other micro-batch's
        yield
        return self._defer_tp_sum(scattered.rows()[:self._counts[self._dp.rank]])

    @property
    def padded(self) -> bool:
        """True if the groups' rows are padded to the largest group."""
        return self._padded

    def _pad_groups(self, rows: torch.Tensor) -> torch.Tensor:
        """Pads each group's rows of the rows of all to the largest group."""
        if self._token_rows is None:
            return rows
        padded = rows.new_zeros(max(self._counts) * self._dp.size, rows.shape[1])
        padded[self._token_rows] = rows
        return padded

    def _pad_local(self, x: torch.Tensor) -> torch.Tensor:
        """Pads this group's rows to the largest group."""
        missing = max(self._counts) - x.shape[0]
        return pad(x, (0, 0, 0, missing)) if missing else x  # pad copies in any case

    def _defer_tp_sum(self, part: torch.Tensor) -> MaybeDeferred:
        return DeferredSum(part, self._attn_tp) if self._attn_tp.size > 1 else part

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers ``[own, a]`` to the rows of all groups, in the order of their ranks."""
        own = self._counts[self._dp.rank]
        assert x.shape[0] == own, f"{x.shape[0]} rows, but begin_step announced {own}"
        if self._padded:
            rows = self._dp.all_gather_rows(self._pad_local(x))
            return rows if self._token_rows is None else rows[self._token_rows]
        first = sum(self._counts[:self._dp.rank])
        rows = x.new_zeros(sum(self._counts), x.shape[1])
        rows[first:first + own] = x
        return self._dp.all_reduce(rows)
