"""Choice of tokens from logits that nothing changes any more: greedily, or by temperature, truncation and noise.

Drawing is argmax(probability / noise) with exponential noise, which draws from the probabilities (the Gumbel-max
trick) without a cumulative sum. A seeded row's noise is a hash of (seed, position, token): it depends on nothing else
that runs in the batch, nor on the number of ranks or the device.

``TorchSampling`` says what is meant, and runs anywhere; ``FusedSampling`` is the same on a GPU in kernels that sort
nothing. A seeded row draws the same token by both, but where two tokens are as close as float32 rounds.
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
from .gumbel_noise import SMALLEST, seeded_exponential

log = logging.getLogger("baton.engine")

SamplingBackend = Literal["auto", "torch", "triton"]


class SamplingKernels(Protocol):
    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        """Tokens ``[R]`` int64 of ``logits`` [R, vocab] of 16 or 32 bits, by ``params`` and ``position`` of ``rows``
        [R, not 0].

        Neither changes the logits nor waits for the device.
        """


def choose_drawing(backend: SamplingBackend, vocab_size: int, device: torch.device, seed: int,
                   dtype: torch.dtype = torch.float32) -> SamplingKernels:
    """``auto``: the kernels on a GPU where they work, tried now over logits in float32 and in ``dtype``. Raises
    ConfigError where ``triton`` cannot run."""
    plain = TorchSampling(vocab_size, device, seed)
    if backend == "torch" or (backend == "auto" and not (device.type == "cuda" and AVAILABLE)):
        return plain
    if not AVAILABLE or (device.type == "cpu" and not INTERPRETED):
        raise ConfigError("--sampling-backend triton needs a GPU and the package triton: use torch.")
    fused = FusedSampling(device, seed)
    if backend == "auto" and (trouble := _trouble(fused, vocab_size, device, {torch.float32, dtype})):
        log.warning("Sampling runs without its fused kernels: %s.", trouble)
        return plain
    return fused


def _trouble(fused: SamplingKernels, vocab_size: int, device: torch.device, dtypes: set[torch.dtype]) -> str | None:
    """Why the kernels cannot be used here; None where they draw as TorchSampling does."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, vocab_size, generator=generator) * 3).to(torch.bfloat16).to(device)
    params = [SamplingParams(temperature=0.7 + 0.1 * row, seed=row, top_k=50 if row % 2 else -1,
                             top_p=0.9 if row % 4 > 1 else 1.0, min_p=0.01 if row > 5 else 0.0) for row in range(8)]
    whole = [SamplingParams(seed=row) for row in range(8)]  # draws without a cut are another kernel
    trials = [(logits.to(dtype), [SamplingMetadata(one, 5) for one in some]) for dtype in dtypes for some in (params,
                                                                                                              whole)]
    try:
        found = [fused(*trial).tolist() for trial in trials]
    except Exception as error:  # whatever a compiler does on a machine that nobody has seen
        return f"{type(error).__name__}: {error}"
    plain = TorchSampling(vocab_size, device, 0)
    wanted = [plain(*trial).tolist() for trial in trials]
    return None if found == wanted else f"they drew {found} in place of {wanted}"


class TorchSampling:
    def __init__(self, vocab_size: int, device: torch.device, seed: int):
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        tokens = logits.argmax(-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not drawn:
            return tokens
        index = self._tensor(drawn)
        subset = [rows[i].params for i in drawn]
        probabilities = self._truncate(scaled_logits(logits[index].float(), subset), subset).softmax(-1)
        noise = self._noise(subset, [rows[i].position for i in drawn])
        tokens[index] = (probabilities / noise).argmax(-1)
        return tokens

    def _truncate(self, scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """Set to -inf what top-k, then top-p of the rest, then min-p rule out; sorts only the rows that need it."""
        cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
        if cut:
            index = self._tensor(cut)
            scaled[index] = self._top_k_top_p(scaled[index], [params[row] for row in cut])
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
        """Exponential noise ``[len(params), vocab]``, above 0."""
        seeded = [row for row, p in enumerate(params) if p.seed is not None]
        shape = (len(params), self._vocab_size)
        noise = torch.empty(shape, device=self._device)
        if len(seeded) < len(params):
            noise.exponential_(generator=self._generator)
        if seeded:
            seeds = self._tensor([params[row].seed or 0 for row in seeded])
            counters = self._tensor([positions[row] for row in seeded])
            noise[self._tensor(seeded)] = seeded_exponential(seeds, counters, self._vocab_size)
        return noise.clamp_(min=SMALLEST)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return upload(values, dtype, self._device)


def scaled_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits [n, vocab] over their temperatures, which are not 0, with a maximum of 0."""
    temperature = upload([p.temperature for p in params], torch.float32, logits.device)
    # A tiny temperature would make inf - inf = NaN of the largest logits; shifted first, it makes 0 and -inf.
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


class FusedSampling:
    """Samples by ``kernels.sampling``. Rows without a seed get one for the step, from a generator on the host."""

    def __init__(self, device: torch.device, seed: int):
        self._device = device
        self._generator = np.random.default_rng(seed & (2**64 - 1))
        self._known: list[SamplingParams] = []
        self._table = _Table([], 0)

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        params = [row.params for row in rows]
        if params != self._known:  # identity is compared first: a batch that goes on costs microseconds
            self._known, self._table = params, _Table(params, logits.shape[1])
        table = self._table
        if not table.drawn:
            return argmax(logits)[1]
        filled = table.filled([row.position for row in rows], self._generator)
        sent = upload_joined([filled.ravel()], torch.int64, self._device).view(filled.shape)
        peaks, tokens = argmax(logits)
        chosen = kernel.sample(logits, peaks, sent, table.truncates)
        if len(table.drawn) == len(rows):
            return chosen
        tokens[sent[0]] = chosen
        return tokens


class _Table:
    """The parameters of a batch's draws as the kernels take them; ``drawn`` are the rows that are not greedy."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int):
        self.drawn = [i for i, p in enumerate(params) if not p.greedy]
        subset = [params[i] for i in self.drawn]
        self.truncates = any(p.top_k > 0 or p.top_p < 1 for p in subset)
        self._index = np.array(self.drawn, np.int64)
        self._fixed = np.zeros((kernel.INTS + kernel.FLOATS, len(subset)), np.int64)
        self._fixed[0] = self.drawn
        self._fixed[1] = [p.seed or 0 for p in subset]
        self._fixed[3] = [min(p.top_k, vocab_size) for p in subset]
        floats = self._fixed[kernel.INTS:].view(np.float64)
        floats[0] = [max(p.temperature, 1e-30) for p in subset]  # float32 would make 0 of less
        floats[1] = [p.top_p for p in subset]
        floats[2] = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in subset]
        self._unseeded = np.array([place for place, p in enumerate(subset) if p.seed is None], np.int64)

    def filled(self, positions: Sequence[int], generator: np.random.Generator) -> np.ndarray:
        """With this step's positions and seeds."""
        table = self._fixed
        table[2] = np.array(positions, np.int64)[self._index]
        if len(self._unseeded):
            table[1, self._unseeded] = generator.integers(-(2**63), 2**63 - 1, len(self._unseeded), endpoint=True)
        return table
