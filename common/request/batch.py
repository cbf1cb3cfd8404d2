"""Contents of one step: chunks of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

from .req import Req

if TYPE_CHECKING:
    from .input_batch import InputBatch


class Chunk(NamedTuple):
    """The request's tokens ``start:stop``, which the step computes; ``samples``: they include the last token, so that
    the step samples the next one."""

    req: Req
    start: int
    stop: int
    samples: bool


class InputBatchChunks(Sequence[Chunk]):
    """The chunks of an input batch's next step, built when they are read: most steps need none."""

    def __init__(self, input_batch: InputBatch):
        self._reqs = input_batch.reqs
        self._positions = input_batch.positions
        self._built: list[Chunk] | None = None

    def __len__(self) -> int:
        return len(self._reqs)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return self._chunks()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks())

    def _chunks(self) -> list[Chunk]:
        if self._built is None:
            self._built = [Chunk(req, start, start + 1, True)
                           for req, start in zip(self._reqs, self._positions.tolist())]
        return self._built


@dataclass(frozen=True)
class ScheduledBatch:
    """The chunks of one step.

    ``is_decode``: each is one token long and samples. Otherwise the last ``num_decode_rows`` of them are, in a mixed
    chunk (SGLang's word for a step of prompts and running requests). ``input_batch``: the persistent batch that a
    decode step's chunks belong to; ``last_step_rows``: its rows whose last step this is.
    """

    chunks: Sequence[Chunk]
    is_decode: bool
    num_decode_rows: int = 0
    input_batch: InputBatch | None = None
    last_step_rows: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        if self.is_decode:
            return len(self.chunks)
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def prefill_chunks(self) -> Sequence[Chunk]:
        """The chunks of requests in prefill."""
        return [] if self.is_decode else self.chunks[:len(self.chunks) - self.num_decode_rows]
