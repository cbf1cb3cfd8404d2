"""Choice of the next tokens of a batch, vectorised over its rows: see Choosing for the parts, and Drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..distributed.tp import TPGroup
from ..forward.host_copies import Download, upload
from ..request.logit_bias import add_bias
from ..request.sampling_metadata import FAILED, RequestedLogprobs, SamplingMetadata
from .apply_processors import process
from .bitmask import forbid_unallowed
from .penalties import penalize
from .sampling_backend import SamplingBackend, choose_drawing, scaled_logits
from .token_logprobs import LogprobReport, TokenLogprob


@dataclass(frozen=True)
class SamplerOutput:
    """One entry a row: the token, and what was asked about log-probabilities. ``failures`` says why rows have FAILED
    in place of a token, on the rank that chooses."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    failures: Mapping[int, str]


class Sampler:
    """Under tensor parallelism rank 0 chooses and the others receive its tokens (and no log-probabilities)."""

    def __init__(self, vocab_size: int, device: torch.device | str, seed: int, tp: TPGroup | None = None, *,
                 original_logprobs: bool = False, backend: SamplingBackend = "auto",
                 dtype: torch.dtype = torch.float32):
        """``original_logprobs``: log-probabilities are those before temperature. ``dtype`` is that of the logits that
        ``draw`` will be given. Raises ConfigError where ``backend`` cannot run."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tp = tp or TPGroup()
        self._original_logprobs = original_logprobs
        self._draw = choose_drawing(backend if self._tp.rank == 0 else "torch", vocab_size, self._device, seed, dtype)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
               previous: torch.Tensor | None = None) -> SamplerOutput:
        """``launch`` and wait."""
        return self.launch(logits, rows, previous).wait()

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
               previous: torch.Tensor | None = None) -> PendingSample:
        """Choose a token for each row of ``logits`` [R, vocab] float32, which is mutated: see Choosing.

        ``previous`` holds the tokens that the step before chose, for rows with a ``pending`` one. Log-probabilities are
        those of the distribution after masks, penalties, bias, processors and temperature, and before truncation:
        SGLang's. Nothing here waits for the device, unless a processor does.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        processed = any(row.processor for row in rows)
        if not rows or self._tp.rank > 0:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            return PendingSample(self._tp.broadcast(tokens) if rows else tokens, [None] * len(rows), logits,
                                 processed=processed)
        if any(row.allowed or row.history or row.bias or row.suppressed for row in rows):
            _adjust(logits, rows, previous)
        failures = process(logits, rows, previous) if processed else {}
        tokens = self._draw(logits, rows)
        if failures:
            tokens[upload(list(failures), torch.int64, self._device)] = FAILED
        self._tp.broadcast(tokens)
        wanted = [row.logprobs for row in rows]
        told = self._told(logits, rows) if any(wanted) else logits
        return PendingSample(tokens, wanted, told, processed=processed, failures=failures)

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        """Tokens [R] int64 where step 5 of Choosing is all there is, on every rank; ``logits``, of 16 or 32
        bits, stay as they are."""
        if self._tp.rank > 0:
            return self._tp.broadcast(torch.empty(len(rows), dtype=torch.int64, device=self._device))
        return self._tp.broadcast(self._draw(logits, rows))

    def _told(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        """``logits`` as log-probabilities see them: rows that want any are divided by their temperature, in place."""
        heated = [i for i, row in enumerate(rows)
                  if row.logprobs is not None and row.params.temperature not in (0.0, 1.0)]
        if heated and not self._original_logprobs:
            index = upload(heated, torch.int64, self._device)
            logits[index] = scaled_logits(logits[index], [rows[i].params for i in heated])
        return logits


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingMetadata], previous: torch.Tensor | None) -> None:
    """What changes single logits: steps 1 to 3 of Choosing."""
    forbid_unallowed(logits, rows)
    penalize(logits, rows, previous)
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
    """A choice that the device is making. ``tokens`` [R] int64 live there; ``wait`` brings all of it to the host.

    What computes on ``tokens`` before the host has looked at them finds a token of the vocabulary even in rows that
    have FAILED: what it makes of it is dropped with the request.
    """

    def __init__(self, tokens: torch.Tensor, wanted: Sequence[RequestedLogprobs | None], logits: torch.Tensor, *,
                 processed: bool = False, failures: Mapping[int, str] | None = None):
        """``processed``: some of ``tokens`` may be FAILED."""
        self._download = Download([tokens])
        self.tokens = tokens.clamp(min=0) if processed else tokens
        self._report = LogprobReport(logits, self.tokens, wanted)
        self._failures = failures or {}

    def token_ids(self) -> list[int]:
        """Wait for the tokens alone, as ``tokens`` has them."""
        return [max(token, 0) for token in self._download.wait()[0]]

    def wait(self) -> SamplerOutput:
        return SamplerOutput(self._download.wait()[0], self._report.wait(), self._failures)
