"""Sampling backends: sample tokens from final logits, greedily, or by temperature, truncation and Gumbel noise.

Sampling is argmax(probability / noise) with exponential noise, which samples from the probabilities (the Gumbel-max
trick) without a cumulative sum. A seeded row's noise is a hash of (seed, position, token): it depends neither on the
rest of the batch, nor on the number of ranks or the device.

``TorchSampling`` is the reference, and runs anywhere; ``FusedSampling`` computes the same on a GPU with kernels that do
not sort. A seeded row gets the same token by both, except where two tokens are as close as float32 rounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from ...kernels._triton import AVAILABLE, INTERPRETED
from ...kernels.sampling import sample as kernel
from ...kernels.sampling.argmax import argmax
from ..api.errors import ConfigError
from ..api.sampling import SamplingParams
from ..forward.host_copies import upload, upload_joined
from ..request.sampling_metadata import SamplingMetadata
from .gumbel_noise import MIN_NOISE, seeded_exponential

log = logging.getLogger("baton.engine")

SamplingBackend = Literal["auto", "torch", "triton"]


class SamplingKernels(Protocol):
    """Samples tokens by temperature, truncation and noise."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        """Returns tokens ``[R]`` int64 of ``logits`` [R, vocab] of 16 or 32 bits, by ``params`` and ``position`` of
        ``rows`` [R, not 0].

        Neither changes the logits nor waits for the device.
        """


def select_sampling_backend(backend: SamplingBackend, vocab_size: int, device: torch.device, seed: int,
                            dtype: torch.dtype = torch.float32) -> SamplingKernels:
    """Creates the backend; ``auto`` selects the kernels on a GPU where they work, tried now with logits in float32 and
    ``dtype``. Raises ConfigError where ``triton`` cannot run."""
    reference = TorchSampling(vocab_size, device, seed)
    if backend == "torch" or (backend == "auto" and not (device.type == "cuda" and AVAILABLE)):
        return reference
    if not AVAILABLE or (device.type == "cpu" and not INTERPRETED):
        raise ConfigError("--sampling-backend triton needs a GPU and the package triton: use torch.")
    fused = FusedSampling(device, seed)
    if backend == "auto" and (failure := _self_test(fused, vocab_size, device, {torch.float32, dtype})):
        log.warning("Sampling runs without its fused kernels: %s.", failure)
        return reference
    return fused


def _self_test(fused: SamplingKernels, vocab_size: int, device: torch.device, dtypes: set[torch.dtype]) -> str | None:
    """Returns why the kernels cannot be used here; None where they sample the same tokens as TorchSampling."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, vocab_size, generator=generator) * 3).to(torch.bfloat16).to(device)
    params = [SamplingParams(temperature=0.7 + 0.1 * row, seed=row, top_k=50 if row % 2 else -1,
                             top_p=0.9 if row % 4 > 1 else 1.0, min_p=0.01 if row > 5 else 0.0) for row in range(8)]
    untruncated = [SamplingParams(seed=row) for row in range(8)]  # use another kernel
    trials = [(logits.to(dtype), [SamplingMetadata(one, 5) for one in rows])
              for dtype in dtypes for rows in (params, untruncated)]
    try:
        actual = [fused(*trial).tolist() for trial in trials]
    except Exception as error:  # whatever a compiler does on an unknown machine
        return f"{type(error).__name__}: {error}"
    reference = TorchSampling(vocab_size, device, 0)
    expected = [reference(*trial).tolist() for trial in trials]
    return None if actual == expected else f"they drew {actual} in place of {expected}"


class TorchSampling:
    """The reference backend in torch."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int):
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        tokens = logits.argmax(-1)
        random_rows = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not random_rows:
            return tokens
        index = self._tensor(random_rows)
        subset = [rows[i].params for i in random_rows]
        probabilities = self._truncate(scaled_logits(logits[index].float(), subset), subset).softmax(-1)
        noise = self._noise(subset, [rows[i].position for i in random_rows])
        tokens[index] = (probabilities / noise).argmax(-1)
        return tokens

    def _truncate(self, scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """Sets to -inf what top-k, then top-p of the rest, then min-p rule out; sorts only the rows that need it."""
        truncated = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
        if truncated:
            index = self._tensor(truncated)
            scaled[index] = self._top_k_top_p(scaled[index], [params[row] for row in truncated])
        if any(p.min_p > 0 for p in params):
            floor = self._tensor([p.min_p for p in params], torch.float32).log()
            scaled.masked_fill_(scaled < scaled.amax(-1, keepdim=True) + floor[:, None], float("-inf"))
        return scaled

    def _top_k_top_p(self, scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        top_k = self._tensor([p.top_k if p.top_k > 0 else self._vocab_size for p in params])
        ordered.masked_fill_(torch.arange(self._vocab_size, device=self._device) >= top_k[:, None], float("-inf"))
        top_p = self._tensor([p.top_p for p in params], torch.float32)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        excess = before >= top_p[:, None]
        excess[:, 0] = False
        ordered.masked_fill_(excess & (top_p < 1)[:, None], float("-inf"))
        return torch.empty_like(scaled).scatter_(-1, order, ordered)

    def _noise(self, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
        """Returns exponential noise ``[len(params), vocab]``, above 0."""
        seeded = [row for row, p in enumerate(params) if p.seed is not None]
        shape = (len(params), self._vocab_size)
        noise = torch.empty(shape, device=self._device)
        if len(seeded) < len(params):
            noise.exponential_(generator=self._generator)
        if seeded:
            seeds = self._tensor([params[row].seed or 0 for row in seeded])
            counters = self._tensor([positions[row] for row in seeded])
            noise[self._tensor(seeded)] = seeded_exponential(seeds, counters, self._vocab_size)
        return noise.clamp_(min=MIN_NOISE)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return upload(values, dtype, self._device)


def scaled_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Divides logits [n, vocab] by their temperatures, which are not 0; shifts their maximum to 0."""
    temperature = upload([p.temperature for p in params], torch.float32, logits.device)
    # With a tiny temperature the largest logits would become inf - inf = NaN; shifted first, they become 0 and -inf.
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


class FusedSampling:
    """The kernels of ``kernels.sampling``. Rows without a seed get one for the step, from a generator on the host."""

    def __init__(self, device: torch.device, seed: int):
        self._device = device
        self._generator = np.random.default_rng(seed & (2**64 - 1))
        self._tables: list[tuple[list[SamplingParams], _Table]] = []  # of the last batches: plain rows, and others

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        params = [row.params for row in rows]
        table = self._table_of(params, logits.shape[1])
        if not table.random_rows:
            return argmax(logits)[1]
        filled = table.filled([row.position for row in rows], self._generator)
        on_device = upload_joined([filled.ravel()], torch.int64, self._device).view(filled.shape)
        peaks, tokens = argmax(logits)
        sampled = kernel.sample(logits, peaks, on_device, table.truncates)
        if len(table.random_rows) == len(rows):
            return sampled
        tokens[on_device[0]] = sampled
        return tokens

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

    def filled(self, positions: Sequence[int], generator: np.random.Generator) -> np.ndarray:
        """Returns the table with this step's positions and seeds."""
        table = self._fixed
        table[2] = np.array(positions, np.int64)[self._index]
        if len(self._unseeded):
            table[1, self._unseeded] = generator.integers(-(2**63), 2**63 - 1, len(self._unseeded), endpoint=True)
        return table
