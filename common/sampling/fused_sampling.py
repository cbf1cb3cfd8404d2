"""The sampling backend of Baton's own kernels, which do not sort."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...kernels._triton import AVAILABLE, INTERPRETED
from ...kernels.sampling import sample as kernel
from ...kernels.sampling.argmax import argmax
from ...kernels.tuning.policy import policy_of
from ..api.errors import ConfigError
from ..api.sampling import SamplingParams
from ..config.server.kernels import SAMPLING_BACKENDS
from ..forward.host_copies import upload_joined
from ..request.sampling_metadata import SamplingMetadata
from .sampling_backend import SamplingKernels


@SAMPLING_BACKENDS.register("triton", needs={"triton": "triton"}, traits=("gpu",))
def make(vocab_size: int, device: torch.device, seed: int) -> SamplingKernels:
    if not AVAILABLE or (device.type == "cpu" and not INTERPRETED):
        raise ConfigError("--sampling-backend triton needs a GPU and the package triton: use torch.")
    return FusedSampling(device, seed)


class FusedSampling:
    """The kernels of ``kernels.sampling``. Rows without a seed get one for the step, from a generator on the host."""

    def __init__(self, device: torch.device, seed: int):
        self._device = device
        # Else a row would be sampled by another kernel where another row of its batch truncates.
        self._always_truncates = policy_of(device).batch_invariant
        self._generator = np.random.default_rng(seed & (2**64 - 1))
        self._tables: list[tuple[list[SamplingParams], _Table]] = []  # of the last batches: plain rows, and others
        # The rows of the last call with positions on the device, and their table there.
        self._uploaded: tuple[Sequence[SamplingMetadata], _Table, torch.Tensor] | None = None

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
                 positions: torch.Tensor | None = None) -> torch.Tensor:
        table, on_device = self._on_device(rows, logits.shape[1], positions is not None)
        peaks, tokens = argmax(logits)
        if not table.random_rows:
            return tokens
        sampled = kernel.sample(logits, peaks, on_device, table.truncates or self._always_truncates, positions)
        if len(table.random_rows) == len(rows):
            return sampled
        tokens[on_device[0]] = sampled
        return tokens

    def _on_device(self, rows: Sequence[SamplingMetadata], vocab_size: int, keeps: bool) -> tuple[_Table, torch.Tensor]:
        """Returns the table of ``rows``, and its copy on the device; ``keeps``: it is needed again for the same rows,
        whatever their positions."""
        if keeps and self._uploaded is not None and self._uploaded[0] is rows:
            return self._uploaded[1:]
        table = self._table_of([row.params for row in rows], vocab_size)
        if not table.random_rows:
            return table, torch.empty(0)
        filled = table.filled([row.position for row in rows], self._generator)
        on_device = upload_joined([filled.ravel()], torch.int64, self._device).view(filled.shape)
        if keeps and not table.draws_seeds:
            self._uploaded = rows, table, on_device
        return table, on_device

    def _table_of(self, params: list[SamplingParams], vocab_size: int) -> _Table:
        for known, table in self._tables:
            if known == params:  # identity is compared first: an unchanged batch costs microseconds
                return table
        table = _Table(params, vocab_size)
        self._tables = [(params, table), *self._tables[:1]]
        return table


class _Table:
    """The sampling parameters of a batch in the kernels' layout; ``random_rows`` are the rows that are not greedy."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int):
        self.random_rows = [i for i, p in enumerate(params) if not p.greedy]
        subset = [params[i] for i in self.random_rows]
        self.truncates = any(p.top_k > 0 or p.top_p < 1 for p in subset)
        self._index = np.array(self.random_rows, np.int64)
        self._fixed = np.zeros((kernel.INTS + kernel.FLOATS, len(subset)), np.int64)
        self._fixed[0] = self.random_rows
        self._fixed[1] = [p.seed or 0 for p in subset]
        self._fixed[3] = [min(p.top_k, vocab_size) for p in subset]
        floats = self._fixed[kernel.INTS:].view(np.float64)
        floats[0] = [max(p.temperature, 1e-30) for p in subset]  # less would be 0 in float32
        floats[1] = [p.top_p for p in subset]
        floats[2] = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in subset]
        self._unseeded = np.array([column for column, p in enumerate(subset) if p.seed is None], np.int64)

    @property
    def draws_seeds(self) -> bool:
        """True if some row gets another seed in each step."""
        return len(self._unseeded) > 0

    def filled(self, positions: Sequence[int], generator: np.random.Generator) -> np.ndarray:
        """Returns the table with this step's positions and seeds."""
        table = self._fixed
        table[2] = np.array(positions, np.int64)[self._index]
        if len(self._unseeded):
            table[1, self._unseeded] = generator.integers(-(2**63), 2**63 - 1, len(self._unseeded), endpoint=True)
        return table
