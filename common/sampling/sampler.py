"""The sampler: samples the next tokens of a batch, vectorised over its rows. See SamplingMetadata for the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch

from ...kernels.arguments import PlacedChains
from ...kernels.sampling.argmax import argmax as argmax_and_value
from ..api.sampling import SamplingParams
from ..distributed.tp import TPGroup
from ..forward.host_copies import upload
from ..request.extras import Extra, Report
from ..request.sampling_metadata import FAILED, NOT_FINITE, SamplingMetadata
from ..request.step_output import RowOutput
from .extras.logprobs import LOGPROBS, LogprobReport, SampledLogprobs, TokenLogprob
from .extras.processor import PROCESSOR
from .loose_acceptance import LooseSampling, drafts_in_chains
from .sampled_tokens import SampledTokenBuffers, SampledTokens
from .sampling_backend import SamplingKernels, select_sampling_backend
from .torch_sampling import TorchSampling, scaled_logits

_NO_FAILURES: Mapping[int, str] = {}


class Sample(NamedTuple):
    """A sample that the device is computing. ``tokens`` [R] int64 are on the device; ``is_argmax``: they are the model
    runner's.

    A step that computes on ``tokens`` before the host has read them gets a token of the vocabulary even in rows that
    have failed: its results are dropped with the request. ``failures`` says why, by row. ``checks_finite``: rows may
    have NOT_FINITE.
    """

    tokens: torch.Tensor
    copied: SampledTokens
    reports: Sequence[Report] = ()
    failures: Mapping[int, str] = _NO_FAILURES
    is_argmax: bool = False
    checks_finite: bool = False

    def token_ids(self) -> list[int]:
        """Waits for the tokens; those of failed rows are FAILED, or NOT_FINITE."""
        return self.copied.token_ids()


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens and requested log-probabilities, one entry a row. ``failures`` says why rows have FAILED instead
    of a token."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    failures: Mapping[int, str]


class Sampler:
    """Samples tokens. Under tensor parallelism rank 0 samples, and the others receive its tokens only."""

    def __init__(self, vocab_size: int, device: torch.device | str, seed: int, tp: TPGroup | None = None, *,
                 original_logprobs: bool = False, backend: str = "auto", dtype: torch.dtype = torch.float32,
                 accept_thresholds: tuple[float, float] = (1.0, 1.0), checks_finite: bool = False):
        """``original_logprobs``: log-probabilities are those before temperature. ``dtype`` is that of the logits.
        ``accept_thresholds``: those of LooseSampling. ``checks_finite``: rows whose logits have NaN or infinity get
        NOT_FINITE. Raises ConfigError where ``backend`` cannot run."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tp = tp or TPGroup()
        self._original_logprobs = original_logprobs
        self._checks_finite = checks_finite
        own_backend = backend if self._tp.rank == 0 else "torch"
        self._backend: SamplingKernels = select_sampling_backend(own_backend, vocab_size, self._device, seed, dtype)
        self._loose: LooseSampling | None = None
        if accept_thresholds != (1.0, 1.0):
            reference = TorchSampling(vocab_size, self._device, seed)
            self._backend = self._loose = LooseSampling(self._backend, reference, *accept_thresholds)
        self._buffers = SampledTokenBuffers()
        self._chain_rows: tuple[Sequence[SamplingParams], Sequence[SamplingMetadata]] = (), ()  # of the last chain step

    @property
    def accepts_loosely(self) -> bool:
        """True if drafts may be accepted that were not sampled."""
        return self._loose is not None

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
               previous: torch.Tensor | None = None) -> SamplerOutput:
        """Launches sampling and waits for it."""
        sample = self.launch(logits, rows, previous)
        outputs: dict[int, RowOutput] = {}
        for report in sample.reports:
            report.add_to(outputs)
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        for row, output in outputs.items():
            if (found := output.logprobs) is not None:
                logprobs[row] = TokenLogprob(found.values[0] or 0.0, found.top[0], found.of_ids[0])
        return SamplerOutput(sample.token_ids(), logprobs, sample.failures)

    def launch(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata], previous: torch.Tensor | None = None, *,
               extra_rows: Sequence[int] | None = None, argmax: torch.Tensor | None = None,
               index: Sequence[int] | None = None) -> Sample:
        """Starts sampling a token for each row of ``logits`` [R, vocab], of 16 or 32 bits; where all rows have extras,
        float32 logits are mutated. Nothing here waits for the device, unless a processor does.

        ``previous`` holds the tokens that the step before sampled, for rows with a pending one. ``extra_rows``: those
        that may have extras, equal on all ranks; found in ``rows`` if None. ``argmax`` [R]: that of ``logits``, equal
        on all ranks, where all rows without extras take it. ``index`` [R]: the rows' requests, for reports.

        Rows without extras are sampled from the logits as they are. The others' logits are copied as float32, changed
        by their extras, and sampled apart. Log-probabilities are those of the distribution after masks, penalties,
        bias, processors and temperature, and before truncation, as SGLang's.
        """
        if extra_rows is None:
            extra_rows = [row for row, metadata in enumerate(rows) if metadata.extras]
        assert logits.shape == (len(rows), self._vocab_size)
        if not rows:
            tokens = torch.empty(0, dtype=torch.int64, device=self._device)
            return Sample(tokens, self._buffers.copy(tokens))
        if not extra_rows and argmax is not None:
            # Every rank has the whole logits, bit by bit the same: so each computes the same argmax.
            return Sample(argmax, self._buffers.copy(self.mark(argmax, logits)), is_argmax=True,
                          checks_finite=self._checks_finite)
        return self._launch(logits, rows, previous, extra_rows, argmax, index)

    @torch.inference_mode()
    def launch_chains(self, logits: torch.Tensor, params: Sequence[SamplingParams], placed: PlacedChains,
                      out: torch.Tensor) -> None:
        """Starts sampling all rows of a chain step of B requests with ``params``, none of which has extras, and writes
        the tokens to ``out`` [B * width] int64. ``logits`` [B * width, vocab]; ``placed`` may have more requests. All
        ranks get the tokens of rank 0."""
        if self._tp.rank == 0:
            rows = self._rows_of_chains(params, len(out) // len(params))
            positions = placed.sample_positions[:len(out)]
            if self._loose is None:
                tokens = self._backend(logits, rows, positions)
            else:
                tokens = self._loose(logits, rows, positions, drafts_in_chains(placed, len(params)))
            out.copy_(self.mark(tokens, logits))
        self._tp.broadcast(out)

    def mark(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the ``tokens`` [R], NOT_FINITE where ``logits`` [R, vocab] have NaN or infinity; on the device, and
        only where this sampler checks. The largest logit is NaN where any is; -infinity alone is a masked token."""
        return tokens.masked_fill(_not_finite(logits), NOT_FINITE) if self._checks_finite else tokens

    @property
    def checks_finite(self) -> bool:
        return self._checks_finite

    def _rows_of_chains(self, params: Sequence[SamplingParams], width: int) -> Sequence[SamplingMetadata]:
        """Returns the metadata of ``width`` rows of each request, without positions."""
        known, rows = self._chain_rows
        if known != params or len(rows) != len(params) * width:  # identity is compared first
            rows = [SamplingMetadata(one, 0) for one in params for _ in range(width)]
            self._chain_rows = params, rows
        return rows

    @torch.inference_mode()
    def _launch(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata], previous: torch.Tensor | None,
                extra_rows: Sequence[int], argmax: torch.Tensor | None, index: Sequence[int] | None) -> Sample:
        if not extra_rows:
            tokens = self._tp.broadcast(self._plain(logits, rows))
            return Sample(tokens.clamp(min=0) if self._checks_finite else tokens, self._buffers.copy(tokens),
                          checks_finite=self._checks_finite)
        reports: list[Report] = []
        failures: Mapping[int, str] = _NO_FAILURES
        if self._tp.rank > 0:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        else:
            tokens, reports, failures = self._with_extras(logits, rows, previous, extra_rows, argmax, index)
        self._tp.broadcast(tokens)
        return Sample(tokens.clamp(min=0), self._buffers.copy(tokens), reports, self._shared(failures, rows),
                      checks_finite=self._checks_finite)

    def _shared(self, failures: Mapping[int, str], rows: Sequence[SamplingMetadata]) -> Mapping[int, str]:
        """Returns the sampling rank's ``failures`` on all ranks: each of them reports a failed request to its peers."""
        if self._tp.size == 1 or not any(extra is PROCESSOR for row in rows for extra, _ in row.extras):
            return failures
        encoded = msgspec.msgpack.encode(failures) if self._tp.rank == 0 else None
        return msgspec.msgpack.decode(self._tp.broadcast_bytes(encoded), type=dict[int, str])

    def _plain(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata]) -> torch.Tensor:
        if self._tp.rank > 0:
            return torch.empty(len(rows), dtype=torch.int64, device=self._device)
        return self.mark(self._backend(logits, rows), logits)

    def _with_extras(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata], previous: torch.Tensor | None,
                     extra_rows: Sequence[int], argmax: torch.Tensor | None,
                     index: Sequence[int] | None) -> tuple[torch.Tensor, list[Report], dict[int, str]]:
        """Returns the tokens of all rows, reports, and why rows have failed."""
        chosen = [rows[row] for row in extra_rows]
        bad = _not_finite(logits) if self._checks_finite else None
        if bad is not None:  # extras and reports of these rows mean nothing, but must not fail
            logits = logits.masked_fill(bad[:, None], 0)
        if len(extra_rows) == len(rows):
            tokens, final, failed = self._sample_changed(logits.float(), chosen, previous)
            sampled = tokens
        else:
            on_device = upload(extra_rows, torch.int64, self._device)
            sampled, final, failed = self._sample_changed(logits[on_device].float(), chosen, previous)
            tokens = self._backend(logits, rows) if argmax is None else argmax.clone()
            tokens[on_device] = sampled
        reports = self._logprob_reports(final, sampled.clamp(min=0), chosen,
                                        [row if index is None else index[row] for row in extra_rows])
        if bad is not None:
            tokens = tokens.masked_fill(bad, NOT_FINITE)
        return tokens, reports, {extra_rows[i]: reason for i, reason in failed.items()}

    def _sample_changed(self, logits: torch.Tensor, rows: Sequence[SamplingMetadata],
                        previous: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
        """Applies the rows' extras to ``logits`` [R, vocab] float32, in place; returns tokens, logits, and failures."""
        members: dict[Extra, list[tuple[int, Any]]] = {}
        for i, row in enumerate(rows):
            for extra, value in row.extras:
                members.setdefault(extra, []).append((i, value))
        failures: dict[int, str] = {}
        for extra in sorted(members, key=lambda extra: extra.order):
            if extra.apply is not None:
                failures |= extra.apply(logits, members[extra], previous)
        tokens = self._backend(logits, rows)
        if failures:
            tokens[upload(list(failures), torch.int64, self._device)] = FAILED
        return tokens, logits, failures

    def _logprob_reports(self, logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingMetadata],
                         index: Sequence[int]) -> list[Report]:
        """Returns the report of the rows whose log-probabilities are requested, divided by their temperature."""
        requested = [(i, value) for i, row in enumerate(rows) for extra, value in row.extras if extra is LOGPROBS]
        if not requested:
            return []
        chosen = [i for i, _ in requested]
        if len(chosen) < len(rows):
            on_device = upload(chosen, torch.int64, self._device)
            logits, tokens = logits[on_device], tokens[on_device]
        params = [rows[i].params for i in chosen]
        scaled = [i for i, one in enumerate(params) if one.temperature not in (0.0, 1.0)]
        if scaled and not self._original_logprobs:
            on_device = upload(scaled, torch.int64, self._device)
            logits[on_device] = scaled_logits(logits[on_device], [params[i] for i in scaled])
        return [SampledLogprobs(LogprobReport(logits, tokens, [value for _, value in requested]),
                                [index[i] for i in chosen])]


def _not_finite(logits: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(argmax_and_value(logits)[0]).logical_not_()
