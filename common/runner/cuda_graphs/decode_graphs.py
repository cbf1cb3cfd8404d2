"""Decode steps as CUDA graphs: a step's hundreds of kernels launch as one.

A graph replays fixed addresses and a fixed batch size. So one graph is captured for each size of a list, all over the
same static input; a batch runs padded to the next size. Padding rows compute one token each whose key and value go to
a scratch page that no request owns.

Data-parallel attention groups replay together, each its own graph of one size: what they exchange in it are equal
parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ....kernels.sampling.argmax import argmax
from ...attention.base import AttentionPlanner
from ...forward.forward_batch import DecodeTable, ForwardBatch, Row, build_forward_batch
from ...models.causal_lm import CausalLM
from .decode_inputs import DecodeInputs

_BY_TYPE = (("input_ids", "positions", "page_of_token", "offset_in_page"),
            ("kv_indptr", "kv_indices", "kv_last_page_len"))
"""What a graph reads, the int64 ones and the int32 ones."""


def default_sizes(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8 (of 16 beyond 128): padding costs at most a few rows, a size about 0.2 s."""
    steps = [1, 2, 4, *range(8, 129, 8), *range(144, largest + 1, 16)]
    return sorted({size for size in steps if size < largest} | {largest})


def sizes_to_capture(wanted: Sequence[int], largest: int) -> list[int]:
    """Those of ``wanted`` up to ``largest``; where there are none, the default ones."""
    return [size for size in wanted if size <= largest] or default_sizes(largest)


class DecodeGraphs:
    """Captures at construction; ``run`` replays. ``max_pages`` bounds the pages of one request. ``begin`` is told of a
    size before a step of it is computed."""

    def __init__(self, model: CausalLM, attention: AttentionPlanner, sizes: Sequence[int], page_size: int,
                 max_pages: int, scratch_page: int, device: torch.device, begin: Callable[[int], None],
                 progress: Callable[[float], None]):
        self._sizes = sorted(sizes)
        self._attention = attention
        self._scratch_page = scratch_page
        self.padding_row = Row([0], 0, np.array([scratch_page]))
        inputs = self._table = DecodeInputs(self._sizes[-1], self._sizes[-1] * max_pages, scratch_page, device)
        self._static = self._static_batch(page_size, inputs.tensors, device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._likeliest: dict[int, torch.Tensor] = {}
        self._views = {size: self._inputs(size) for size in self._sizes}
        self._batches: dict[int, ForwardBatch] = {}
        self._rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._fed: int | None = None  # the size whose likeliest tokens stand in ``input_ids``
        memory = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then fit into its memory.
        for done, size in enumerate(reversed(self._sizes)):
            begin(size)
            self._capture(size, model, max_pages * page_size, memory)
            progress((done + 1) / len(self._sizes))

    def size_for(self, num_reqs: int) -> int | None:
        """The captured size that a batch runs at; None where it is larger than all."""
        index = bisect_left(self._sizes, num_reqs)
        return self._sizes[index] if index < len(self._sizes) else None

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits ``[size, vocab]`` of a decode batch of a captured size, in the model's type; the next run overwrites
        them."""
        size = batch.num_reqs
        for names in _BY_TYPE:  # one kernel for tensors of a type, in place of one each
            sources = [getattr(batch, name) for name in names]
            torch._foreach_copy_([getattr(self._static, name)[:len(source)] for name, source in zip(names, sources)],
                                 sources)
        self._table.overwritten()
        self._fed = None
        self._attention.refresh(batch)
        self._graphs[size].replay()
        return self._logits[size]

    def decode(self, table: DecodeTable, token_ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[B, vocab]`` of ``table``'s rows in the model's type, whose tokens [B] int64 are on the device, and
        the likeliest token [B] int64 of each. The next run of this size overwrites both.

        A graph leaves its likeliest tokens where it reads them: given back to the run that follows they are not copied.
        """
        host = self._table.fill(table, size)
        input_ids, logits, likeliest = self._rows_of(size, len(table.positions))
        if token_ids is not likeliest or self._fed != size:
            input_ids.copy_(token_ids)
        batch = self._batches[size]
        batch.kv_indptr_cpu, batch.kv_indices_cpu = host["kv_indptr"], host["kv_indices"]
        batch.kv_last_page_len_cpu = host["kv_last_page_len"]
        self._attention.refresh(batch)
        self._graphs[size].replay()
        self._fed = size if len(table.positions) else None  # padding's tokens are nobody's
        return logits, likeliest

    def _rows_of(self, size: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first ``count`` of the input ids, logits and likeliest tokens of a size. A slice costs microseconds."""
        found = self._rows.get((size, count))
        if found is None:
            found = self._rows[size, count] = (
                self._views[size]["input_ids"][:count], self._logits[size][:count], self._likeliest[size][:count])
        return found

    def _static_batch(self, page_size: int, tensors: dict[str, torch.Tensor], device: torch.device) -> ForwardBatch:
        batch = build_forward_batch([self.padding_row] * self._sizes[-1], page_size, device, True)
        for name, tensor in tensors.items():
            setattr(batch, name, tensor)
        return batch

    def _inputs(self, size: int) -> dict[str, torch.Tensor]:
        static = self._static
        return {
            "input_ids": static.input_ids[:size], "positions": static.positions[:size],
            "page_of_token": static.page_of_token[:size], "offset_in_page": static.offset_in_page[:size],
            "kv_indptr": static.kv_indptr[:size + 1], "kv_indices": static.kv_indices,
            "kv_last_page_len": static.kv_last_page_len[:size],
        }

    def _capture(self, size: int, model: CausalLM, max_length: int, memory: Any) -> None:
        static, attention = self._static, self._attention
        batch = ForwardBatch(
            is_decode=True, logits_rows=None, qo_indptr=static.qo_indptr[:size + 1], **self._views[size],
            qo_indptr_cpu=static.qo_indptr_cpu[:size + 1], kv_indptr_cpu=static.kv_indptr_cpu[:size + 1],
            kv_indices_cpu=static.kv_indices_cpu[:size], kv_last_page_len_cpu=static.kv_last_page_len_cpu[:size])
        self._batches[size] = batch

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            batch.live = batch.page_of_token != self._scratch_page
            logits = model.forward(batch, attention, lambda layer: None)
            return logits, argmax(logits, batch.input_ids)[1]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            attention.plan(batch, max_length=max_length)
            forward()  # libraries allocate and compile outside of the capture
        torch.cuda.current_stream().wait_stream(stream)
        attention.plan(batch, max_length=max_length)  # what a backend plans in its first layer has to be in the graph
        graph = torch.cuda.CUDAGraph()
        # Other threads of a rank (NCCL's, transfers') call CUDA too, and must not end the capture.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            self._logits[size], self._likeliest[size] = forward()
        graph.replay()  # the first launch brings the graph to the device: 0.6 ms, which requests would wait for
        self._graphs[size] = graph
