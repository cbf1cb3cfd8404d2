"""Token embedding and output head, split over tensor-parallel ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding

from ...kernels.gemm.dense_matmul import compile_tiles, dense_matmul
from ...kernels.rowwise.gather_rows import gather_rows
from ..distributed.tp import TPGroup
from ..weights.slots import Allocate, Slot


class VocabTable:
    """A ``[vocab, hidden]`` table of which this rank holds an equal share of rows, the last share zero-padded.

    It embeds tokens (``embed``) and scores them (``scores``): one table does both where a model ties them.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, tp: TPGroup, allocate: Allocate):
        self.name = name
        self.vocab_size = vocab_size
        self.tp = tp
        rows = -(-vocab_size // tp.size)
        self.start = tp.rank * rows
        self.weight = allocate(rows, hidden_size)
        self.used = max(0, min(rows, vocab_size - self.start))
        self.weight[self.used:].zero_()
        if allocate.device.type == "cuda":
            compile_tiles(self.weight)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] to ``[T, hidden]``."""
        if self.tp.size == 1:
            return gather_rows(self.weight, ids)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill_(elsewhere[:, None], 0)
        return self.tp.all_reduce(found)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, hidden]`` to logits ``[R, vocab]`` in its type, whole on every rank and contiguous in its rows."""
        if not len(hidden):
            return hidden.new_empty((0, self.vocab_size))
        return self.tp.all_gather_last_dim(self.columns(hidden))[:, :self.vocab_size]

    def columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logits, ``[R, hidden]`` to ``[R, c]``: side by side, the ranks' begin with ``vocab``
        columns."""
        return dense_matmul(hidden, self.weight) if len(hidden) else hidden.new_empty((0, len(self.weight)))

    def slots(self) -> Iterator[Slot]:
        if self.used:
            yield Slot(f"{self.name}.weight", self.weight[:self.used], (self.vocab_size, self.weight.shape[1]), 0,
                       self.start)
