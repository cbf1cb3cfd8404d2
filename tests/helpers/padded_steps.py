"""Decode steps as CUDA graphs compute them, without any: padded to the sizes of a list."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from baton.common.forward.forward_batch import BatchColumns, ForwardBatch, TokenIds
from baton.common.forward.step_context import StepContext
from baton.common.runner.dp_sync import DPStepInfo


class PaddedSteps:
    """Stands in for a runner's DecodeGraphs. ``replayed`` has the size of every step that it ran."""

    def __init__(self, runner, sizes):
        self._runner, self._sizes = runner, sizes
        self.replayed = []

    def size_for(self, num_reqs):
        return min((size for size in self._sizes if size >= num_reqs), default=None)

    def decode(self, step, size):
        count, tokens = step.columns.num_reqs, step.token_ids
        if isinstance(tokens, TokenIds):
            tokens = tokens.on_device(torch.device("cpu"))
        tokens = torch.nn.functional.pad(tokens, (0, size - count))
        logits = self._run(ForwardBatch.from_columns(self._padded(step.columns, size - count), tokens, tokens.device))
        return logits[:count], logits[:count].argmax(-1)

    def _padded(self, columns, more):
        page, end = self._runner.num_pages, columns.kv_indptr[-1]
        behind = (*(np.full(more, value) for value in (0, page, 0)), end + np.arange(1, more + 1), np.full(more, page),
                  np.full(more, 1))
        arrays = [np.concatenate(both).astype(both[0].dtype) for both in zip(columns[:6], behind)]
        return BatchColumns(*arrays, None, np.arange(columns.num_reqs + more + 1, dtype=np.int32), 1)

    def _run(self, batch):
        assert batch.is_decode and batch.num_reqs in self._sizes
        self.replayed.append(batch.num_reqs)
        runner = self._runner
        plan = runner._attention.plan(batch, runner._workspace)
        rows, logits = runner._rows_of(DPStepInfo.uniform_decode(runner._parallel.dp_size, batch.num_reqs))
        rows = runner._model.token_exchange.mark_live(rows, batch.page_of_token != runner.num_pages)
        return runner._model.forward(StepContext(dataclasses.replace(batch, logits_rows=None), plan, rows, logits))
