"""Launches chain steps: captured graphs verify and draft, and the host reads what they leave, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.arguments import CHAIN_COUNT, CHAIN_TOKENS
from ..forward.chain_rows import ChainRows
from ..forward.forward_batch import indptr_of, ragged_positions
from ..forward.host_copies import upload_joined
from ..request.sampling_metadata import NOT_FINITE
from ..request.step_input import StepInput
from ..request.step_output import RowOutput, StepOutput
from ..sampling.sampled_tokens import SampledTokenBuffers, SampledTokens
from .non_finite import fail_non_finite

if TYPE_CHECKING:
    from ..runner.cuda_graphs.chain_graphs import Verified
    from ..runner.model_runner import ModelRunner
    from ..sampling.sampler import Sampler
    from .executor import LaunchedStep

SampleRows = Callable[[StepInput, torch.Tensor, torch.Tensor], "LaunchedStep"]
"""Samples the rows of a step with row extras: of its logits [S, V], whose argmax [S] is known."""


@dataclass(frozen=True)
class LaunchedChains:
    """A chain step that was launched. ``result``: its requests' rows of ChainState.packed, each of
    ``columns`` numbers; ``sampled``: the samples of a step with row extras, whose tokens count."""

    step: StepInput
    result: SampledTokens
    columns: int
    sampled: LaunchedStep | None = None

    def wait(self) -> StepOutput:
        """Waits for the step; changes no request. To be called once."""
        step, found = self.step, self.result.token_ids()
        assert step.chains is not None
        begins = range(0, len(found), self.columns)
        first, end = CHAIN_TOKENS + 1, CHAIN_TOKENS + step.chains.width
        drafts = [found[begin + first:begin + end] for begin in begins]
        if self.sampled is not None:
            output = self.sampled.wait()
            output.chain_drafts = drafts
            return output
        counts = found[CHAIN_COUNT::self.columns]
        samples = CHAIN_TOKENS + (self.columns - CHAIN_TOKENS) // 2
        tokens: list[int] = []
        for begin, count in zip(begins, counts):
            tokens += found[begin + samples:begin + samples + count]
        extras: dict[int, RowOutput] = {}
        if NOT_FINITE in tokens:
            fail_non_finite(step, counts, tokens, extras)
        return StepOutput(step.sample_index, counts, tokens, extras, chain_drafts=drafts)


class ChainLauncher:
    """Launches chain steps on one rank's ``runner``; the samples of plain rows are ``sampler``'s."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, sample_rows: SampleRows):
        self._runner = runner
        self._sampler = sampler
        self._sample_rows = sample_rows
        self._buffers = SampledTokenBuffers()
        self._last = 0

    @torch.inference_mode()
    def launch(self, step: StepInput, chains: ChainRows) -> LaunchedChains:
        """Starts computing a step, which may follow the chain step launched before it."""
        follows = bool((chains.sources >= 0).any())
        assert not follows or chains.follows == self._last, "a row follows the chain step before"
        self._last = step.number
        verified = self._runner.verify_chains(chains)
        sampled = None
        greedy = step.all_greedy
        if step.extra_index:
            sampled = self._with_extras(step, chains, verified)
            greedy = all(req.sampling.greedy for req in step.reqs)
        elif not greedy:
            self._sampler.launch_chains(verified.logits, [req.sampling for req in step.reqs], verified.placed,
                                        verified.samples)
        elif self._sampler.checks_finite:
            verified.samples.copy_(self._sampler.mark(verified.samples, verified.logits))
        self._runner.draft_chains(verified, step.reqs, greedy=greedy)
        result = self._buffers.copy(verified.result)
        return LaunchedChains(step, result, len(verified.result) // len(step.reqs), sampled)

    def _with_extras(self, step: StepInput, chains: ChainRows, verified: Verified) -> LaunchedStep:
        """Samples the valid rows of a step whose drafts the host knows; they are sampled as those of other steps."""
        begins = np.arange(len(step.reqs)) * chains.width
        rows = upload_joined([ragged_positions(begins, step.num_samples, indptr_of(step.num_samples))], torch.int64,
                             verified.samples.device)
        sampled = self._sample_rows(step, verified.logits[rows], verified.samples[rows])
        verified.samples[rows] = sampled.sample.copied.tokens
        return sampled
