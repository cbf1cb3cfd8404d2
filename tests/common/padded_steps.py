"""Decode steps as CUDA graphs compute them, without any: padded to the sizes of a list."""

from __future__ import annotations

import dataclasses

import numpy as np

from baton.common.engine.forward_batch import Row


class PaddedSteps:
    """Stands in for a runner's DecodeGraphs. ``replayed`` has the size of every step that it ran."""

    def __init__(self, runner, sizes):
        self._runner, self._sizes = runner, sizes
        self.padding_row = Row([0], 0, np.array([runner.num_pages]))
        self.replayed = []

    def size_for(self, num_reqs):
        return min((size for size in self._sizes if size >= num_reqs), default=None)

    def run(self, batch):
        assert batch.is_decode and batch.num_reqs in self._sizes
        self.replayed.append(batch.num_reqs)
        self._runner._attention.plan(batch)
        return self._runner._model.forward(dataclasses.replace(batch, logits_rows=None), self._runner._attention,
                                           lambda layer: None)
