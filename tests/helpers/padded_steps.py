"""Decode steps as CUDA graphs compute them, without any: padded to the sizes of a list."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from baton.common.forward.forward_batch import DecodeTable, Row, build_table_batch
from baton.common.forward.step_context import StepContext
from baton.common.runner.dp_sync import DPStepInfo


class PaddedSteps:
    """Stands in for a runner's DecodeGraphs. ``replayed`` has the size of every step that it ran."""

    def __init__(self, runner, sizes):
        self._runner, self._sizes = runner, sizes
        self.padding_row = Row([0], 0, np.array([runner.num_pages]))
        self.replayed = []

    def size_for(self, num_reqs):
        return min((size for size in self._sizes if size >= num_reqs), default=None)

    def decode(self, table, token_ids, size):
        count = len(table.positions)
        logits = self.run(build_table_batch(self._padded(table, size - count),
                                            torch.nn.functional.pad(token_ids, (0, size - count)), token_ids.device))
        return logits[:count], logits[:count].argmax(-1)

    def _padded(self, table, more):
        page, end = self.padding_row.page_ids[0], table.kv_indptr[-1]
        behind = DecodeTable(*(np.full(more, value) for value in (0, page, 0)), end + np.arange(1, more + 1),
                             np.full(more, page), np.full(more, 1))
        return DecodeTable(*(np.concatenate(both).astype(both[0].dtype) for both in zip(table[:6], behind)))

    def run(self, batch):
        assert batch.is_decode and batch.num_reqs in self._sizes
        self.replayed.append(batch.num_reqs)
        runner = self._runner
        plan = runner._attention.plan(batch, runner._workspace)
        rows, logits = runner._rows_of(DPStepInfo.uniform_decode(runner._parallel.dp_size, batch.num_reqs))
        rows = runner._model.token_exchange.mark_live(rows, batch.page_of_token != runner.num_pages)
        return runner._model.forward(StepContext(dataclasses.replace(batch, logits_rows=None), plan, rows, logits))
