"""The reference sampling backend, in torch: it sorts, and runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..api.sampling import SamplingParams
from ..config.server.kernels import SAMPLING_BACKENDS
from ..forward.host_copies import upload
from ..request.sampling_metadata import SamplingMetadata
from .gumbel_noise import MIN_NOISE, seeded_exponential
from .sampling_backend import SamplingKernels


@SAMPLING_BACKENDS.register("torch")
def make(vocab_size: int, device: torch.device, seed: int) -> SamplingKernels:
    return TorchSampling(vocab_size, device, seed)


class TorchSampling:
    """The reference backend in torch."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int):
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
                 positions: torch.Tensor | None = None) -> torch.Tensor:
        tokens = logits.argmax(-1)
        random_rows = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not random_rows:
            return tokens
        index = self._tensor(random_rows)
        subset = [rows[i].params for i in random_rows]
        probabilities = self.probabilities(logits[index].float(), subset)
        if positions is None:
            counters = self._tensor([rows[i].position for i in random_rows])
        else:
            counters = positions[index]
        noise = self._noise(subset, counters)
        tokens[index] = (probabilities / noise).argmax(-1)
        return tokens

    def probabilities(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """Returns the distribution [n, vocab] of rows that are not greedy."""
        return self._truncate(scaled_logits(logits, params), params).softmax(-1)

    def _truncate(self, scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """Sets to -inf what top-k, then top-p of the rest, then min-p rule out; sorts only the rows that need it."""
        truncated = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
        if truncated:
            index = self._tensor(truncated)
            top_k = self._tensor([params[row].top_k if params[row].top_k > 0 else self._vocab_size
                                  for row in truncated])
            top_p = self._tensor([params[row].top_p for row in truncated], torch.float32)
            scaled[index] = mask_excess(scaled[index], top_k[:, None], top_p[:, None])
        if any(p.min_p > 0 for p in params):
            floor = self._tensor([p.min_p for p in params], torch.float32).log()
            scaled.masked_fill_(scaled < scaled.amax(-1, keepdim=True) + floor[:, None], float("-inf"))
        return scaled

    def _noise(self, params: Sequence[SamplingParams], positions: torch.Tensor) -> torch.Tensor:
        """Returns exponential noise ``[n, vocab]``, above 0, of rows with ``params`` and ``positions`` [n]."""
        seeded = [row for row, p in enumerate(params) if p.seed is not None]
        shape = (len(params), self._vocab_size)
        noise = torch.empty(shape, device=self._device)
        if len(seeded) < len(params):
            noise.exponential_(generator=self._generator)
        if seeded:
            seeds = self._tensor([params[row].seed or 0 for row in seeded])
            index = self._tensor(seeded)
            noise[index] = seeded_exponential(seeds, positions[index], self._vocab_size)
        return noise.clamp_(min=MIN_NOISE)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return upload(values, dtype, self._device)


def scaled_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Divides logits [n, vocab] by their temperatures, which are not 0; shifts their maximum to 0."""
    temperature = upload([p.temperature for p in params], torch.float32, logits.device)
    # With a tiny temperature the largest logits would become inf - inf = NaN; shifted first, they become 0 and -inf.
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def mask_excess(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Returns logits [n, vocab] with -inf for what ``top_k`` [n, 1], then ``top_p`` [n, 1] of the rest rule out."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ordered.masked_fill_(torch.arange(scaled.shape[-1], device=scaled.device) >= top_k, float("-inf"))
    probabilities = ordered.softmax(-1)
    excess = probabilities.cumsum(-1) - probabilities >= top_p
    excess[:, 0] = False
    ordered.masked_fill_(excess & (top_p < 1), float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)
