"""Choice of the next tokens of a batch, vectorised over its rows.

Choosing is argmax(probability / noise) with exponential noise, which draws from the probabilities (the Gumbel-max
trick) without a cumulative sum. A seeded row's noise is a hash of (seed, position, token): it depends on nothing else
that runs in the batch, nor on the number of ranks or the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..api.sampling import SamplingParams
from ..distributed.tp import TPGroup
from .bitmask import forbid_unallowed
from .choosing import FAILED, Choosing, WantedLogprobs
from .host_copies import Download, upload
from .logit_bias import add_bias
from .noise import SMALLEST, seeded_exponential
from .penalties import penalize
from .processors import process
from .token_logprobs import LogprobReport, TokenLogprob


@dataclass(frozen=True)
class Sampled:
    """One entry a row: the token, and what was asked about log-probabilities. ``failures`` says why rows have FAILED
    in place of a token, on the rank that chooses."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    failures: Mapping[int, str]


class Sampler:
    """Under tensor parallelism rank 0 chooses and the others receive its tokens (and no log-probabilities)."""

    def __init__(self, vocab_size: int, device: torch.device | str, seed: int, tp: TPGroup | None = None, *,
                 original_logprobs: bool = False):
        """``original_logprobs``: log-probabilities are those before temperature."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tp = tp or TPGroup()
        self._original_logprobs = original_logprobs
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(seed)

    def sample(self, logits: torch.Tensor, rows: Sequence[Choosing], previous: torch.Tensor | None = None) -> Sampled:
        """``launch`` and wait."""
        return self.launch(logits, rows, previous).wait()

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, rows: Sequence[Choosing], previous: torch.Tensor | None = None) -> Launched:
        """Choose a token for each row of ``logits`` [R, vocab] float32, which is mutated: see Choosing.

        ``previous`` holds the tokens that the step before chose, for rows with a ``pending`` one. Log-probabilities are
        those of the distribution after masks, penalties, bias, processors and temperature, and before truncation:
        SGLang's. Nothing here waits for the device, unless a processor does.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        processed = any(row.processor for row in rows)
        if not rows or self._tp.rank > 0:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            return Launched(self._tp.broadcast(tokens) if rows else tokens, [None] * len(rows), logits,
                            processed=processed)
        if any(row.allowed or row.history or row.bias or row.suppressed for row in rows):
            _adjust(logits, rows, previous)
        failures = process(logits, rows, previous) if processed else {}
        tokens = self._choose(logits, rows)
        if failures:
            tokens[self._tensor(list(failures))] = FAILED
        self._tp.broadcast(tokens)
        wanted = [row.logprobs for row in rows]
        told = self._told(logits, rows) if any(wanted) else logits
        return Launched(tokens, wanted, told, processed=processed, failures=failures)

    def _told(self, logits: torch.Tensor, rows: Sequence[Choosing]) -> torch.Tensor:
        """``logits`` as log-probabilities see them: rows that want any are divided by their temperature, in place."""
        heated = [i for i, row in enumerate(rows)
                  if row.logprobs is not None and row.params.temperature not in (0.0, 1.0)]
        if heated and not self._original_logprobs:
            index = self._tensor(heated)
            logits[index] = self._scaled(logits[index], [rows[i].params for i in heated])
        return logits

    def _choose(self, logits: torch.Tensor, rows: Sequence[Choosing]) -> torch.Tensor:
        tokens = logits.argmax(-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not drawn:
            return tokens
        index = self._tensor(drawn)
        subset = [rows[i].params for i in drawn]
        probabilities = self._truncate(self._scaled(logits[index], subset), subset).softmax(-1)
        noise = self._noise(subset, [rows[i].position for i in drawn])
        tokens[index] = (probabilities / noise).argmax(-1)
        return tokens

    def _scaled(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """Logits [n, vocab] over their temperatures, which are not 0."""
        temperature = self._tensor([p.temperature for p in params], torch.float32)
        # A tiny temperature would make inf - inf = NaN of the largest logits; shifted first, it makes 0 and -inf.
        return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]

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


def _adjust(logits: torch.Tensor, rows: Sequence[Choosing], previous: torch.Tensor | None) -> None:
    """What changes single logits: steps 1 to 3 of Choosing."""
    forbid_unallowed(logits, rows)
    penalize(logits, rows, previous)
    biased = [(i, bias) for i, row in enumerate(rows) if (bias := row.bias) is not None]
    if biased:
        add_bias(logits, [i for i, _ in biased], [bias for _, bias in biased])
    _suppress(logits, rows)


def _suppress(logits: torch.Tensor, rows: Sequence[Choosing]) -> None:
    pairs = [(i, token) for i, row in enumerate(rows) for token in row.suppressed]
    if pairs:
        index, tokens = upload(pairs, torch.int64, logits.device).unbind(-1)
        logits[index, tokens] = float("-inf")


class Launched:
    """A choice that the device is making. ``tokens`` [R] int64 live there; ``wait`` brings all of it to the host.

    What computes on ``tokens`` before the host has looked at them finds a token of the vocabulary even in rows that
    have FAILED: what it makes of it is dropped with the request.
    """

    def __init__(self, tokens: torch.Tensor, wanted: Sequence[WantedLogprobs | None], logits: torch.Tensor, *,
                 processed: bool = False, failures: Mapping[int, str] | None = None):
        """``processed``: some of ``tokens`` may be FAILED."""
        self._download = Download([tokens])
        self.tokens = tokens.clamp(min=0) if processed else tokens
        self._report = LogprobReport(logits, self.tokens, wanted)
        self._failures = failures or {}

    def token_ids(self) -> list[int]:
        """Wait for the tokens alone, as ``tokens`` has them."""
        return [max(token, 0) for token in self._download.wait()[0]]

    def wait(self) -> Sampled:
        return Sampled(self._download.wait()[0], self._report.wait(), self._failures)
