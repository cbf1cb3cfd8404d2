"""The draft pass: at the end of each step, the drafter's own layers compute its rows, and draft what may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..api.drafts import Drafts
from ..distributed.tp import TPGroup
from ..forward.host_copies import upload_joined
from ..request.step_input import StepInput
from ..sampling.draft_sampler import CoupledDraftSampler
from ..speculative.base import Drafter, DraftStep, Features
from ..speculative.verify import accept

if TYPE_CHECKING:
    from ..forward.forward_batch import ForwardBatch
    from ..sampling.sampler import Sample


class Verified(NamedTuple):
    """The tokens of a step whose drafts were verified, as StepOutput's, and the drafts after it."""

    counts: list[int]
    tokens: list[int]
    drafts: dict[int, Drafts]


def accepted(step: StepInput, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns how many tokens each request in ``step.sample_index`` gets of its samples, and all of these."""
    if not step.drafts:
        return [1] * len(step.sample_index), list(token_ids)
    sizes = step.num_samples[step.sample_index].tolist()
    return accept(token_ids, sizes, {place: step.drafts[index] for place, index in enumerate(step.sample_index)
                                     if index in step.drafts})


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
        counts, tokens = accepted(step, sample.token_ids())
        limits = list(step.draft_limits) or [0] * len(step.sample_index)
        found = self._drafter.run(DraftStep(
            step, batch, features, next_ids(step, batch, sample.tokens), counts, limits,
            CoupledDraftSampler([req.sampling for req in step.reqs], self._tp)))
        assert len(found) == len(step.sample_index)
        return Verified(counts, tokens, {index: drafts for index, drafts in zip(step.sample_index, found)
                                         if drafts is not None})


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
