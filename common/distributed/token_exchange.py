"""Tokens of data-parallel attention ranks, brought together for what all ranks compute and parted again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch.nn.functional import pad

from .all_to_all import AllToAllExchange
from .deferred_reduce import DeferredRows, DeferredSum, Summed
from .low_latency import GatheredTokens, LowLatencyExchange
from .tp import TPGroup

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Row by row, on equal rows on all ranks: ``[N, a] -> [N, b]``."""
InTwo = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Its result as a sum of two, the second of which may be missing."""


class TokenExchange:
    """``across`` and ``attention`` are Parallel's. Models keep the exchange; each step says by
    ``begin`` how many rows every attention group has in it.

    A step pads the parts to the largest where that moves fewer rows than a sum over zero-filled copies of all would:
    an all-gather moves ``ranks * largest`` rows, an all-reduce twice the total. So a long prompt beside ranks
    that decode does not make them all as long.
    """

    def __init__(self, across: TPGroup, attention: TPGroup | None = None, *, low_latency: bool = False,
                 sends: bool = False):
        # of decode steps; None: they go as prompts do
        self.decode = LowLatencyExchange(across) if low_latency else None
        self.sent = AllToAllExchange(across) if sends else None  # of experts; None: all groups' rows come together
        self._across = across
        self._attention = attention or TPGroup()
        self._counts: list[int] = [0] * across.size
        self._padded = True
        self._kept: torch.Tensor | None = None  # rows of the padded parts that are tokens; None: all are

    @property
    def spans(self) -> bool:
        """Whether there is more than one attention group."""
        return self._across.size > 1

    @property
    def ranks(self) -> int:
        """That it brings together."""
        return self._across.size

    def begin(self, counts: Sequence[int], *, decodes: bool = False) -> None:
        """Rows of each attention group in the calls that follow, equal on all ranks. ``decodes``: in all groups."""
        if not self.spans:
            return
        assert len(counts) == self._across.size
        if self.decode is not None:
            self.decode.begin(counts if decodes else ())
        if self.sent is not None:
            self.sent.begin(counts)
        self._counts = list(counts)
        largest, total = max(counts), sum(counts)
        self._padded = largest * len(counts) <= 2 * total
        self._kept = None
        if self._padded and total < largest * len(counts):
            places = [torch.arange(count) + i * largest for i, count in enumerate(counts)]
            self._kept = torch.cat(places).to(self._across.device)

    def around(self, compute: Compute, x: torch.Tensor | GatheredTokens) -> torch.Tensor:
        """``compute`` of this group's rows ``[own, a]`` together with all others', cut back to its own."""
        if isinstance(x, GatheredTokens):
            return compute(x.rows).chunk(self._across.size)[self._across.rank]
        if not self.spans:
            return compute(x)
        return self._own(self._of_all(compute, x))

    def around_columns(self, compute: Compute, x: torch.Tensor) -> torch.Tensor:
        """``around`` of what every rank computes other columns of: ``compute`` gives ``[N, c]``, the result is
        ``[own, ranks * c]``. Of ranks that are an attention group each: none needs the others' rows."""
        columns = self._of_all(compute, x)
        own, size, peers = self._counts[self._across.rank], self._across.size, self._across.peers
        if peers is not None and peers.gathers(columns):  # so quickly that more of it costs less
            return self._own(self._across.all_gather_last_dim(columns))
        parts = self._across.all_to_all_rows(columns, self._counts, [own] * size)
        return parts.view(size, own, columns.shape[1]).transpose(0, 1).flatten(1)

    def _of_all(self, compute: Compute, x: torch.Tensor) -> torch.Tensor:
        """``compute`` of the rows of all groups, where any has some."""
        return compute(self.gather(x) if sum(self._counts) else x)

    def _own(self, y: torch.Tensor) -> torch.Tensor:
        """This group's of the rows of all."""
        first = sum(self._counts[:self._across.rank])
        return y[first:first + self._counts[self._across.rank]]

    def summed(self, partial: Compute, summands: InTwo, x: torch.Tensor | GatheredTokens) -> Summed:
        """``around`` for what every rank of the engine has a summand of, ``partial``: only the group's own rows are
        summed up, half of the traffic of a sum of all rows on all ranks. What is left of that within the group is for
        the norm that follows; so is all of it, ``summands`` in place of ``partial``, for rows that have met in the norm
        before."""
        if isinstance(x, GatheredTokens):
            return DeferredRows(*summands(x.rows), self._across)
        if not self.spans:
            return self._within(partial(x))
        y, own = partial(self.gather(x)), self._counts[self._across.rank]
        if self._padded:
            mine = self._across.reduce_scatter_rows(self._apart(y))[:own]
        else:
            first = sum(self._counts[:self._across.rank])
            mine = self._across.all_reduce(y)[first:first + own]
        return self._within(mine)

    def summed_in_stages(self, partial: Compute, x: torch.Tensor) -> Generator[None, None, Summed]:
        """``summed`` of padded parts, which yields while rows travel: what is enqueued until it goes on runs beside."""
        assert self._padded
        gathered = self._across.start_gather(self._filled(x))
        yield
        rows = gathered.rows()
        y = partial(rows if self._kept is None else rows[self._kept])
        scattered = self._across.start_scatter(self._apart(y))
        del gathered, rows, y  # room for the other half's
        yield
        return self._within(scattered.rows()[:self._counts[self._across.rank]])

    @property
    def padded(self) -> bool:
        """Whether the parts are padded to the largest."""
        return self._padded

    def _apart(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all groups as padded parts."""
        if self._kept is None:
            return rows
        padded = rows.new_zeros(max(self._counts) * self._across.size, rows.shape[1])
        padded[self._kept] = rows
        return padded

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        """This group's rows as a padded part."""
        lacking = max(self._counts) - x.shape[0]
        return pad(x, (0, 0, 0, lacking)) if lacking else x  # pad copies in any case

    def _within(self, part: torch.Tensor) -> Summed:
        return DeferredSum(part, self._attention) if self._attention.size > 1 else part

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[own, a]`` to the rows of all groups, in the order of their ranks."""
        own = self._counts[self._across.rank]
        assert x.shape[0] == own, f"{x.shape[0]} rows where {own} were told"
        if self._padded:
            rows = self._across.all_gather_rows(self._filled(x))
            return rows if self._kept is None else rows[self._kept]
        first = sum(self._counts[:self._across.rank])
        rows = x.new_zeros(sum(self._counts), x.shape[1])
        rows[first:first + own] = x
        return self._across.all_reduce(rows)
