"""The sampler: samples the next tokens of a batch, vectorised over its rows. See SamplingMetadata for the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..distributed.tp import TPGroup
from ..forward.host_copies import Download, upload
from ..request.logit_bias import add_bias
from ..request.sampling_metadata import FAILED, RequestedLogprobs, SamplingMetadata
from .apply_processors import apply_processors
from .bitmask import apply_token_bitmask
from .penalties import apply_penalties
from .sampling_backend import select_sampling_backend
from .token_logprobs import LogprobReport, TokenLogprob
from .torch_sampling import scaled_logits


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens and requested log-probabilities, one entry a row. ``failures`` says why rows have FAILED instead
    of a token, on the rank that samples."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    failures: Mapping[int, str]


class Sampler:
    """Samples tokens. Under tensor parallelism rank 0 samples, and the others receive its tokens only."""

    def __init__(self, vocab_size: int, device: torch.device | str, seed: int, tp: TPGroup | None = None, *,
                 original_logprobs: bool = False, backend: str = "auto",
                 dtype: torch.dtype = torch.float32):
        """``original_logprobs``: log-probabilities are those before temperature. ``dtype`` is that of the logits of
        ``sample_plain``. Raises ConfigError where ``backend`` cannot run."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tp = tp or TPGroup()
        self._original_logprobs = original_logprobs
        self._backend = select_sampling_backend(backend if self._tp.rank == 0 else "torch", vocab_size, self._device,
                                                seed, dtype)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
               previous: torch.Tensor | None = None) -> SamplerOutput:
        """Launches sampling and waits for it."""
        return self.launch(logits, rows, previous).wait()

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
               previous: torch.Tensor | None = None) -> PendingSample:
        """Starts sampling a token for each row of ``logits`` [R, vocab] float32, which is mutated; see
        SamplingMetadata.

        ``previous`` holds the tokens that the step before sampled, for rows with a ``pending`` one. Log-probabilities
        are those of the distribution after masks, penalties, bias, processors and temperature, and before truncation,
        as SGLang's. Nothing here waits for the device, unless a processor does.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        has_processors = any(row.processor for row in rows)
        if not rows or self._tp.rank > 0:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            return PendingSample(self._tp.broadcast(tokens) if rows else tokens, [None] * len(rows), logits,
                                 may_fail=has_processors)
        if any(row.allowed or row.history or row.bias or row.suppressed for row in rows):
            _modify_logits(logits, rows, previous)
        failures = apply_processors(logits, rows, previous) if has_processors else {}
        tokens = self._backend(logits, rows)
        if failures:
            tokens[upload(list(failures), torch.int64, self._device)] = FAILED
        self._tp.broadcast(tokens)
        requested = [row.logprobs for row in rows]
        logprob_logits = self._logprob_logits(logits, rows) if any(requested) else logits
        return PendingSample(tokens, requested, logprob_logits, may_fail=has_processors, failures=failures)

    @torch.inference_mode()
    def sample_plain(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        """Returns sampled tokens [R] int64, on every rank, where rows have step 5 of SamplingMetadata only. ``logits``,
        of 16 or 32 bits, are not changed."""
        if self._tp.rank > 0:
            return self._tp.broadcast(torch.empty(len(rows), dtype=torch.int64, device=self._device))
        return self._tp.broadcast(self._backend(logits, rows))

    def _logprob_logits(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        """Divides rows with requested log-probabilities by their temperature, in place; returns ``logits``."""
        scaled = [i for i, row in enumerate(rows)
                  if row.logprobs is not None and row.params.temperature not in (0.0, 1.0)]
        if scaled and not self._original_logprobs:
            index = upload(scaled, torch.int64, self._device)
            logits[index] = scaled_logits(logits[index], [rows[i].params for i in scaled])
        return logits


def _modify_logits(logits: torch.Tensor, rows: Sequence[SamplingMetadata], previous: torch.Tensor | None) -> None:
    """Applies steps 1 to 3 of SamplingMetadata, which change single logits."""
    apply_token_bitmask(logits, rows)
    apply_penalties(logits, rows, previous)
    biased = [(i, bias) for i, row in enumerate(rows) if (bias := row.bias) is not None]
    if biased:
        add_bias(logits, [i for i, _ in biased], [bias for _, bias in biased])
    _suppress(logits, rows)


def _suppress(logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> None:
    pairs = [(i, token) for i, row in enumerate(rows) for token in row.suppressed]
    if pairs:
        index, tokens = upload(pairs, torch.int64, logits.device).unbind(-1)
        logits[index, tokens] = float("-inf")


class PendingSample:
    """A sample that the device is computing. ``tokens`` [R] int64 are on the device; ``wait`` copies all of it to the
    host.

    A step that computes on ``tokens`` before the host has read them gets a token of the vocabulary even in rows that
    have FAILED: its results are dropped with the request.
    """

    def __init__(self, tokens: torch.Tensor, requested: Sequence[RequestedLogprobs | None], logits: torch.Tensor, *,
                 may_fail: bool = False, failures: Mapping[int, str] | None = None):
        """``may_fail``: some of ``tokens`` may be FAILED."""
        self._download = Download([tokens])
        self.tokens = tokens.clamp(min=0) if may_fail else tokens
        self._report = LogprobReport(logits, self.tokens, requested)
        self._failures = failures or {}

    def token_ids(self) -> list[int]:
        """Waits for the tokens only, with the values of ``tokens``."""
        return [max(token, 0) for token in self._download.wait()[0]]

    def wait(self) -> SamplerOutput:
        """Waits for tokens and log-probabilities."""
        return SamplerOutput(self._download.wait()[0], self._report.wait(), self._failures)
