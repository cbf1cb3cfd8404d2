"""Token embedding and LM head, split over tensor-parallel ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import torch

from ...kernels.gemm.dense_matmul import compile_tiles, dense_matmul, float32_matmul
from ...kernels.rowwise.gather_rows import gather_rows
from ..distributed.tp import TPGroup
from ..weights.slots import Allocate, Slot


class VocabTable:
    """A vocabulary-parallel ``[vocab, hidden]`` table: each rank has an equal part of its rows, the last one
    zero-padded.

    It is a token embedding (``embed``) and an LM head (``logits``): one table is both where a model ties them.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, tp: TPGroup, allocate: Allocate, *,
                 bias: bool = False):
        """``bias``: a head adds one to its logits."""
        self.name = name
        self.vocab_size = vocab_size
        self.tp = tp
        rows = -(-vocab_size // tp.size)
        self.start = tp.rank * rows
        self.weight = allocate(rows, hidden_size)
        self.used = max(0, min(rows, vocab_size - self.start))
        self.weight[self.used:].zero_()
        self.in_float32 = False
        """True: logits are computed in float32."""
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = allocate(rows)
            self.bias[self.used:].zero_()
        if allocate.device.type == "cuda":
            compile_tiles(self.weight)

    def first(self, count: int) -> VocabTable:
        """Returns a table of the first ``count`` tokens over the same weights."""
        table = copy(self)
        table.vocab_size = count
        return table

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeds token ids [T] to ``[T, hidden]``."""
        if self.tp.size == 1:
            return gather_rows(self.weight, ids)
        return self.tp.all_reduce(gather_rows(self.weight, ids, self.start))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes logits ``[R, vocab]`` of ``[R, hidden]`` in its type, or float32, whole on every rank, with
        contiguous rows."""
        if not len(hidden):
            return self._no_rows(hidden, self.vocab_size)
        return self.tp.all_gather_last_dim(self.local_logits(hidden))[:, :self.vocab_size]

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes this rank's columns ``[R, c]`` of the logits of ``[R, hidden]``. The first ``vocab`` columns of the
        ranks' concatenated ones are the logits."""
        if not len(hidden):
            return self._no_rows(hidden, len(self.weight))
        logits = (float32_matmul if self.in_float32 else dense_matmul)(hidden, self.weight)
        return logits if self.bias is None else logits.add_(self.bias)

    def _no_rows(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        return hidden.new_empty((0, width), dtype=torch.float32 if self.in_float32 else None)

    def slots(self) -> Iterator[Slot]:
        if self.used:
            yield Slot(f"{self.name}.weight", self.weight[:self.used], (self.vocab_size, self.weight.shape[1]), 0,
                       self.start)
            if self.bias is not None:
                yield Slot(f"{self.name}.bias", self.bias[:self.used], (self.vocab_size,), 0, self.start)
