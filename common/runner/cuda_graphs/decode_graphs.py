"""CUDA graphs of decode steps: a step's hundreds of kernels launch as one.

A graph replays fixed addresses and a fixed batch size. So one graph is captured for each size of a list, all with the
same static inputs; a batch is padded to the next size. Padding rows compute one token each, whose key and value go to
a scratch page that no request owns.

Data-parallel attention groups replay together, each its own graph of one size: they exchange equal parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ....kernels.sampling.argmax import argmax
from ...attention.base import AttentionPlanner
from ...attention.workspace import AttentionWorkspace
from ...distributed.step_rows import StepRows
from ...forward.forward_batch import ForwardBatch, ModelInput, Row, TokenIds, build_forward_batch
from ...forward.step_context import AttentionPlan, StepContext
from ...models.decoder.causal_lm import CausalLM
from .capture_profile import captured_size
from .decode_inputs import DecodeInputs


def default_sizes(largest: int) -> list[int]:
    """Returns 1, 2, 4, then multiples of 8 (of 16 beyond 128): padding costs at most a few rows, a size about 0.2 s."""
    steps = [1, 2, 4, *range(8, 129, 8), *range(144, largest + 1, 16)]
    return sorted({size for size in steps if size < largest} | {largest})


def sizes_to_capture(requested: Sequence[int], largest: int) -> list[int]:
    """Returns the ``requested`` sizes up to ``largest``; without any, the default ones."""
    return [size for size in requested if size <= largest] or default_sizes(largest)


class GraphPages(NamedTuple):
    """``max_pages`` bounds the pages of one request in a cache group; padding is computed in ``scratch_page``."""

    max_pages: int
    scratch_page: int


class DecodeGraphs:
    """Captures at construction; ``decode`` replays. ``pages`` are those of each cache group.
    ``rows_of`` makes the rows of a step of a size: of the layers, and of the LM head. With ``exact`` batches of other
    sizes are not padded to those of graphs."""

    def __init__(self, model: CausalLM, attention: AttentionPlanner, workspace: AttentionWorkspace,
                 sizes: Sequence[int], page_size: int, pages: Sequence[GraphPages], device: torch.device,
                 rows_of: Callable[[int], tuple[StepRows, StepRows]], progress: Callable[[float], None], *,
                 exact: bool = False):
        self._sizes = sorted(sizes)
        self._exact = exact
        self._attention = attention
        self._workspace = workspace
        self._scratch_page = pages[0].scratch_page
        self._stream = torch.cuda.Stream(device)
        self._inputs = [DecodeInputs(self._sizes[-1], self._sizes[-1] * max_pages, scratch_page, device)
                        for max_pages, scratch_page in pages]
        self._statics = [self._static_batch(page_size, inputs.tensors, device) for inputs in self._inputs]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._argmax: dict[int, torch.Tensor] = {}
        self._input_views = {size: [self._views_of(static, size) for static in self._statics] for size in self._sizes}
        self._steps: dict[int, StepContext] = {}  # those that were captured
        self._row_views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._argmax_in_inputs: int | None = None  # the size whose argmax is in ``input_ids``
        memory = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then fit into its memory.
        for done, size in enumerate(reversed(self._sizes)):
            with captured_size("decode steps", size):
                self._capture(size, model, rows_of(size), pages[0].max_pages * page_size, memory)
            progress((done + 1) / len(self._sizes))

    def size_for(self, num_reqs: int) -> int | None:
        """Returns the captured size that a batch runs at; None where there is none."""
        index = bisect_left(self._sizes, num_reqs)
        found = self._sizes[index] if index < len(self._sizes) else None
        return None if self._exact and found != num_reqs else found

    def decode(self, step: ModelInput, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Replays a plain decode step of B requests; returns logits ``[B, vocab]`` in the model's type and their argmax
        [B] int64. The next run of this size overwrites both.

        A graph writes its argmax to its own ``input_ids``: where the step follows it, nothing is copied.
        """
        count = step.columns.num_reqs
        batch = self._steps[size].batch
        for group, inputs in enumerate(self._inputs):
            _update_host(batch.in_group(group), inputs.fill(step.columns.in_group(group), size))
        input_ids, logits, argmax = self._rows_of(size, count)
        if not step.follows_argmax or self._argmax_in_inputs != size:
            tokens = step.token_ids
            input_ids.copy_(tokens.on_device(input_ids.device) if isinstance(tokens, TokenIds) else tokens)
        self._steps[size].attention.refresh(batch)
        self._graphs[size].replay()
        self._argmax_in_inputs = size if count else None  # padding's tokens belong to no request
        return logits, argmax

    def _rows_of(self, size: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the first ``count`` rows of a size's input ids, logits and argmax. A slice costs microseconds."""
        views = self._row_views.get((size, count))
        if views is None:
            views = self._row_views[size, count] = (
                self._input_views[size][0]["input_ids"][:count], self._logits[size][:count], self._argmax[size][:count])
        return views

    def _static_batch(self, page_size: int, tensors: dict[str, torch.Tensor], device: torch.device) -> ForwardBatch:
        batch = build_forward_batch([Row([0], 0, np.array([self._scratch_page]))] * self._sizes[-1], page_size, device)
        for name, tensor in tensors.items():
            setattr(batch, name, tensor)
        return batch

    @staticmethod
    def _views_of(static: ForwardBatch, size: int) -> dict[str, Any]:
        return {
            "input_ids": static.input_ids[:size], "positions": static.positions[:size],
            "page_of_token": static.page_of_token[:size], "offset_in_page": static.offset_in_page[:size],
            "kv_indptr": static.kv_indptr[:size + 1], "kv_indices": static.kv_indices,
            "kv_last_page_len": static.kv_last_page_len[:size],
        }

    def _capture(self, size: int, model: CausalLM, rows: tuple[StepRows, StepRows], max_length: int,
                 memory: Any) -> None:
        batch, *further = [ForwardBatch(
            max_q_len=1, logits_rows=None, qo_indptr=static.qo_indptr[:size + 1], **views,
            qo_indptr_cpu=static.qo_indptr_cpu[:size + 1], kv_indptr_cpu=static.kv_indptr_cpu[:size + 1],
            kv_indices_cpu=static.kv_indices_cpu[:size], kv_last_page_len_cpu=static.kv_last_page_len_cpu[:size])
            for static, views in zip(self._statics, self._input_views[size])]
        batch.further = tuple(further)

        def plan() -> AttentionPlan:
            return self._attention.plan(batch, self._workspace, max_length=max_length)

        def forward(plan: AttentionPlan) -> tuple[StepContext, torch.Tensor, torch.Tensor]:
            live = model.token_exchange.mark_live(rows[0], batch.page_of_token != self._scratch_page)
            step = StepContext(batch, plan, live, rows[1])
            logits = model.forward(step)
            return step, logits, argmax(logits, batch.input_ids)[1]

        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(plan())  # libraries allocate and compile outside of the capture
        torch.cuda.current_stream().wait_stream(stream)
        captured = plan()  # another one: what its first layer makes, the graph must make in every replay
        graph = torch.cuda.CUDAGraph()
        # Other threads of a rank (NCCL's, transfers') call CUDA too, and must not end the capture.
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            self._steps[size], self._logits[size], self._argmax[size] = forward(captured)
        graph.replay()  # the first launch uploads the graph to the device: 0.6 ms, which requests would wait for
        self._graphs[size] = graph


def _update_host(batch: ForwardBatch, host: dict[str, np.ndarray]) -> None:
    """Replaces the host copies of a captured batch by those of the step that it replays."""
    batch.kv_indptr_cpu, batch.kv_indices_cpu = host["kv_indptr"], host["kv_indices"]
    batch.kv_last_page_len_cpu = host["kv_last_page_len"]
