"""Choice of the next tokens of a batch, vectorised over its rows.

Choosing is argmax(probability / noise) with exponential noise, which draws from the probabilities (the Gumbel-max
trick) without a cumulative sum. A seeded row's noise is a hash of (seed, position, token): it depends on nothing else
that runs in the batch, nor on the number of ranks or the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..api.sampling import SamplingParams
from ..distributed.tp import TPGroup

# Noise of 0 would choose a token of any probability however small; a generator may return it once in 2**24 draws.
_SMALLEST = 2.0**-24


@dataclass(frozen=True)
class Sampled:
    """One entry a row: the token and, where asked for, its log-probability and the likeliest ``(token, value)``."""

    token_ids: list[int]
    logprobs: list[float | None]
    tops: list[list[tuple[int, float]]]


class Sampler:
    """Under tensor parallelism rank 0 chooses and the others receive its tokens (and no log-probabilities)."""

    def __init__(self, vocab_size: int, device: torch.device | str, seed: int, tp: TPGroup | None = None):
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tp = tp or TPGroup()
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(seed)

    def sample(self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int],
               logprobs: Sequence[int | None], suppress: Sequence[tuple[int, ...]] | None = None) -> Sampled:
        """``launch`` and wait."""
        return self.launch(logits, params, positions, logprobs, suppress).wait()

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int],
               logprobs: Sequence[int | None], suppress: Sequence[tuple[int, ...]] | None = None) -> Launched:
        """Choose a token for each row of ``logits`` [R, vocab] float32, which is mutated where tokens are suppressed.

        ``positions`` counts the tokens before the chosen one (of seeded rows: the noise depends on it).
        ``logprobs`` is None or the number of likeliest tokens to report; they are those of the model's own
        distribution, before temperature and truncation. ``suppress`` lists tokens a row must not choose (a request
        below ``min_new_tokens`` names its stop tokens there). Nothing here waits for the device.
        """
        rows = len(params)
        assert logits.shape == (rows, self._vocab_size)
        if rows == 0 or self._tp.rank > 0:
            tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
            return Launched(self._tp.broadcast(tokens) if rows else tokens, _Report(logits, tokens, [None] * rows))
        if suppress is not None:
            _suppress(logits, suppress)
        tokens = self._choose(logits, params, positions)
        self._tp.broadcast(tokens)
        return Launched(tokens, _Report(logits, tokens, logprobs))

    def _choose(self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
        tokens = logits.argmax(-1)
        drawn = [row for row, p in enumerate(params) if not p.greedy]
        if not drawn:
            return tokens
        index = self._tensor(drawn)
        subset = [params[row] for row in drawn]
        temperature = self._tensor([p.temperature for p in subset], torch.float32)
        # A tiny temperature would make inf - inf = NaN of the largest logits; shifted first, it makes 0 and -inf.
        scaled = logits[index]
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[:, None]
        probabilities = self._truncate(scaled, subset).softmax(-1)
        noise = self._noise(subset, [positions[row] for row in drawn])
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
        return noise.clamp_(min=_SMALLEST)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return _upload(values, dtype, self._device)


def seeded_exponential(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential variates ``[n, vocab]`` by hash of ``seeds`` [n], ``positions`` [n] (int64) and token id.

    The hash is SplitMix64's finalizer (Steele, Lea and Flood, 2014) over a chain of the three. 23 bits of it make a
    uniform in (0, 1): with 24, the largest would round to 1 in float32 and its noise to 0.
    """
    keys = _mix(_mix(seeds) ^ positions)
    tokens = torch.arange(vocab_size, device=seeds.device)
    bits = _mix(keys[:, None] + tokens * _GOLDEN)
    uniform = ((bits >> 41) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_()


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that holds it: torch multiplies int64 modulo 2**64, as the hash needs."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_A = _signed(0xBF58476D1CE4E5B9)
_MIX_B = _signed(0x94D049BB133111EB)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_A
    x = (x ^ _shift(x, 27)) * _MIX_B
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _suppress(logits: torch.Tensor, suppress: Sequence[tuple[int, ...]]) -> None:
    pairs = [(row, token) for row, tokens in enumerate(suppress) for token in tokens]
    if pairs:
        rows, tokens = _upload(pairs, torch.int64, logits.device).unbind(-1)
        logits[rows, tokens] = float("-inf")


def _upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A small tensor on the device. From pageable memory the copy would wait for everything that runs there."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class _Download:
    """Tensors on their way to the host; ``wait`` returns them as lists."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if tensors[0].is_cuda:
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                             for t in tensors]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[list[Any]]:
        if self._event is not None:
            self._event.synchronize()
        return [tensor.tolist() for tensor in self._tensors]


class _Report:
    """Log-probabilities of the rows that ask for them: ``wanted`` is None or the number of likeliest tokens."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int | None]):
        self._wanted = wanted
        self._asking = [row for row, count in enumerate(wanted) if count is not None]
        self.tensors: list[torch.Tensor] = []
        if not self._asking:
            return
        index = _upload(self._asking, torch.int64, logits.device)
        scores = logits[index].log_softmax(-1)
        most = min(max(wanted[row] or 0 for row in self._asking), logits.shape[-1])
        values, ids = scores.topk(most, dim=-1)
        self.tensors = [scores.gather(-1, tokens[index, None])[:, 0], values, ids]

    def fill(self, lists: Sequence[list[Any]]) -> tuple[list[float | None], list[list[tuple[int, float]]]]:
        """``(logprob, likeliest)`` of every row, from the host's copies of ``tensors``."""
        chosen: list[float | None] = [None] * len(self._wanted)
        tops: list[list[tuple[int, float]]] = [[] for _ in self._wanted]
        if self._asking:
            for row, value, values, ids in zip(self._asking, *lists):
                chosen[row] = value
                tops[row] = list(zip(ids, values))[:self._wanted[row]]
        return chosen, tops


class Launched:
    """A choice that the device is making. ``tokens`` [R] int64 live there; ``wait`` brings all of it to the host."""

    def __init__(self, tokens: torch.Tensor, report: _Report):
        self.tokens = tokens
        self._report = report
        self._download = _Download([tokens, *report.tensors])

    def wait(self) -> Sampled:
        tokens, *lists = self._download.wait()
        return Sampled(tokens, *self._report.fill(lists))
