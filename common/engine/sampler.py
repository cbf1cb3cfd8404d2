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
from .bitmask import forbid_unallowed
from .choosing import Choosing
from .host_copies import Download, upload
from .noise import SMALLEST, seeded_exponential


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

    def sample(self, logits: torch.Tensor, rows: Sequence[Choosing]) -> Sampled:
        """``launch`` and wait."""
        return self.launch(logits, rows).wait()

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, rows: Sequence[Choosing]) -> Launched:
        """Choose a token for each row of ``logits`` [R, vocab] float32, which is mutated where tokens are ruled out.

        Log-probabilities are those of the model's own distribution, before temperature and truncation. Nothing here
        waits for the device.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        if not rows or self._tp.rank > 0:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            return Launched(self._tp.broadcast(tokens) if rows else tokens, _Report(logits, tokens, [None] * len(rows)))
        forbid_unallowed(logits, rows)
        _suppress(logits, rows)
        tokens = self._choose(logits, rows)
        self._tp.broadcast(tokens)
        return Launched(tokens, _Report(logits, tokens, [row.num_top for row in rows]))

    def _choose(self, logits: torch.Tensor, rows: Sequence[Choosing]) -> torch.Tensor:
        tokens = logits.argmax(-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not drawn:
            return tokens
        index = self._tensor(drawn)
        subset = [rows[i].params for i in drawn]
        temperature = self._tensor([p.temperature for p in subset], torch.float32)
        # A tiny temperature would make inf - inf = NaN of the largest logits; shifted first, it makes 0 and -inf.
        scaled = logits[index]
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[:, None]
        probabilities = self._truncate(scaled, subset).softmax(-1)
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


def _suppress(logits: torch.Tensor, rows: Sequence[Choosing]) -> None:
    pairs = [(i, token) for i, row in enumerate(rows) for token in row.suppressed]
    if pairs:
        index, tokens = upload(pairs, torch.int64, logits.device).unbind(-1)
        logits[index, tokens] = float("-inf")


class _Report:
    """Log-probabilities of the rows that ask for them: ``wanted`` is None or the number of likeliest tokens."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int | None]):
        self._wanted = wanted
        self._asking = [row for row, count in enumerate(wanted) if count is not None]
        self.tensors: list[torch.Tensor] = []
        if not self._asking:
            return
        index = upload(self._asking, torch.int64, logits.device)
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
        self._download = Download([tokens, *report.tensors])

    def wait(self) -> Sampled:
        tokens, *lists = self._download.wait()
        return Sampled(tokens, *self._report.fill(lists))
