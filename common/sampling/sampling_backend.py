"""Sampling backends: sample tokens from final logits, greedily, or by temperature, truncation and Gumbel noise.

Sampling is argmax(probability / noise) with exponential noise, which samples from the probabilities (the Gumbel-max
trick) without a cumulative sum. A seeded row's noise is a hash of (seed, position, token): it depends neither on the
rest of the batch, nor on the number of ranks or the device.

``TorchSampling`` is the reference, and runs anywhere; ``FusedSampling`` computes the same on a GPU with kernels that do
not sort. A seeded row gets the same token by both, except where two tokens are as close as float32 rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from ...kernels._triton import AVAILABLE
from ..api.sampling import SamplingParams
from ..config.server.kernels import SAMPLING_BACKENDS
from ..request.sampling_metadata import SamplingMetadata

log = logging.getLogger("baton.engine")


class SamplingKernels(Protocol):
    """Samples tokens by temperature, truncation and noise."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
                 positions: torch.Tensor | None = None) -> torch.Tensor:
        """Returns tokens ``[R]`` int64 of ``logits`` [R, vocab] of 16 or 32 bits, by ``params`` and ``position`` of
        ``rows`` [R, not 0]; ``positions`` [R] int64 on the device are the rows' where given.

        Neither changes the logits nor waits for the device.
        """


class SamplingFactory(Protocol):
    """A registered backend."""

    def __call__(self, vocab_size: int, device: torch.device, seed: int) -> SamplingKernels:
        """Makes the backend. Raises ConfigError where it cannot run."""


def select_sampling_backend(name: str, vocab_size: int, device: torch.device, seed: int,
                            dtype: torch.dtype = torch.float32) -> SamplingKernels:
    """Creates the backend; ``auto`` selects the kernels on a GPU where they work, tried now with logits in float32 and
    ``dtype``. Raises ConfigError where the named one cannot run."""
    if name != "auto":
        return SAMPLING_BACKENDS.get(name)(vocab_size, device, seed)
    reference = SAMPLING_BACKENDS.get("torch")(vocab_size, device, seed)
    if not (device.type == "cuda" and AVAILABLE):
        return reference
    fused = SAMPLING_BACKENDS.get("triton")(vocab_size, device, seed)
    if failure := _self_test(fused, vocab_size, device, {torch.float32, dtype}):
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
    reference = SAMPLING_BACKENDS.get("torch")(vocab_size, device, 0)
    expected = [reference(*trial).tolist() for trial in trials]
    return None if actual == expected else f"they drew {actual} in place of {expected}"
