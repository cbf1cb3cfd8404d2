"""What one step computes: chunks of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from .req import Req

if TYPE_CHECKING:
    from .input_batch import InputBatch


class Chunk(NamedTuple):
    """The request's tokens ``start:stop`` are computed in this step; ``samples``: they end with its last, and the
    step yields the next one."""

    req: Req
    start: int
    stop: int
    samples: bool


class InputBatchChunks(Sequence[Chunk]):
    """The chunks of a run's next step, made where somebody looks at them: most steps of a run need none."""

    def __init__(self, run: InputBatch):
        self._reqs = run.reqs
        self._positions = run.positions
        self._made: list[Chunk] | None = None

    def __len__(self) -> int:
        return len(self._reqs)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._all())

    def _all(self) -> list[Chunk]:
        if self._made is None:
            self._made = [Chunk(req, start, start + 1, True)
                          for req, start in zip(self._reqs, self._positions.tolist())]
        return self._made


@dataclass(frozen=True)
class ScheduledBatch:
    """The chunks of one step. ``is_decode``: each is one token long and samples. Else the last ``num_riding`` of them
    are, and belong to running requests that ride along with prompts. ``run``: a decode batch's, whose chunks they are;
    ``ending``: places of those for whom it is the last step; ``positions`` [B] int64: those of the tokens that the step
    computes."""

    chunks: Sequence[Chunk]
    is_decode: bool
    num_riding: int = 0
    run: InputBatch | None = None
    ending: Sequence[int] = ()
    positions: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        if self.is_decode:
            return len(self.chunks)
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def prompts(self) -> Sequence[Chunk]:
        """Those of requests in prefill."""
        return [] if self.is_decode else self.chunks[:len(self.chunks) - self.num_riding]
