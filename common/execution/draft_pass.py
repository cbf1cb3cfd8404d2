"""The draft pass: at the end of each step, the drafter's own layers compute its rows, and draft what may follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..api.drafts import Drafts
from ..distributed.tp import TPGroup
from ..forward.host_copies import upload_joined
from ..request.step_input import StepInput
from ..sampling.draft_sampler import CoupledDraftSampler
from ..speculative.base import Drafter, DraftStep, Features
from .accepted_rows import accepted, accepted_batch, accepted_step

if TYPE_CHECKING:
    from ..forward.forward_batch import ForwardBatch
    from ..sampling.sampler import Sample


class Verified(NamedTuple):
    """The tokens of a step whose drafts were verified, as StepOutput's, and the drafts after it."""

    counts: list[int]
    tokens: list[int]
    drafts: dict[int, Drafts]


class DraftPass:
    """Runs a drafter after steps. The ranks of a tensor-parallel group do so alike."""

    def __init__(self, drafter: Drafter, features: Features | None, tp: TPGroup):
        """``features``: those that the drafter reads."""
        self._drafter = drafter
        self._tp = tp
        self.features = None if features is None else features.layers

    @torch.inference_mode()
    def run(self, step: StepInput, batch: ForwardBatch, features: torch.Tensor | None, sample: Sample) -> Verified:
        """Runs it after ``step``, which was computed as ``batch``; waits for its tokens."""
        samples = sample.token_ids()
        counts, rows = accepted(step, samples)
        limits = list(step.draft_limits) or [0] * len(step.sample_index)
        if step.columns.mask is None:
            following = next_ids(step, batch, sample.tokens)
        else:
            step = accepted_step(step, counts, rows)
            kept = upload_joined([np.array(rows)], torch.int64, sample.tokens.device)
            batch, following = accepted_batch(step, batch, kept), sample.tokens[kept]
            features = None if features is None else features[kept]
        found = self._drafter.run(DraftStep(
            step, batch, features, following, counts, limits,
            CoupledDraftSampler([req.sampling for req in step.reqs], self._tp)))
        assert len(found) == len(step.sample_index)
        return Verified(counts, [samples[row] for row in rows], {
            index: drafts for index, drafts in zip(step.sample_index, found) if drafts is not None})


def next_ids(step: StepInput, batch: ForwardBatch, samples: torch.Tensor) -> torch.Tensor:
    """Returns the token [T] int64 that follows each row of a step: the prompt's next one, or the sample [S] of the
    row."""
    following = torch.empty_like(batch.input_ids)
    following[:-1] = batch.input_ids[1:]
    ends = batch.qo_indptr[1:].long() - 1
    rows = step.sample_rows
    if rows is None:
        following[ends] = samples
        return following
    if len(step.sample_index) < len(step):
        sampling = set(step.sample_index)
        known = [0 if index in sampling else int(chunk.req.tokens.view(chunk.stop, chunk.stop + 1)[0])
                 for index, chunk in enumerate(step.chunks)]
        following[ends] = upload_joined([np.array(known)], torch.int64, samples.device)
    following[upload_joined([rows], torch.int64, samples.device)] = samples
    return following
