"""The draft pass: at the end of each step, the drafter's own layers compute its rows, and draft what may follow."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..api.drafts import Drafts
from ..api.sampling import SamplingParams
from ..distributed.tp import TPGroup
from ..forward.forward_batch import ForwardBatch, TokenIds
from ..forward.host_copies import upload_joined
from ..request.step_input import StepInput
from ..sampling.draft_sampler import CoupledDraftSampler
from ..speculative.base import Drafter, DraftStep, Features
from .accepted_rows import Accepted, accepted_batch, accepted_step


class DraftPass:
    """Runs a drafter after steps. The ranks of a tensor-parallel group do so alike."""

    def __init__(self, drafter: Drafter, features: Features | None, tp: TPGroup):
        """``features``: those that the drafter reads."""
        self._drafter = drafter
        self._tp = tp
        self._params: list[SamplingParams] = []
        self._sampler = CoupledDraftSampler(self._params, tp)
        self.features = None if features is None else features.layers

    @torch.inference_mode()
    def run(self, computed: ComputedStep, found: Accepted) -> dict[int, Drafts]:
        """Runs it after a step of which the rows ``found`` are right; returns the drafts by the requests' indices."""
        step, batch, features, samples = computed
        limits = list(step.draft_limits) or [0] * len(step.sample_index)
        if step.columns.mask is None:
            following = next_ids(step, batch, samples)
        else:
            step = accepted_step(step, found)
            rows = upload_joined([np.array(found.rows)], torch.int64, samples.device)
            batch, following = accepted_batch(step, batch, rows), samples[rows]
            features = None if features is None else features[rows]
        drafted = self._drafter.run(DraftStep(
            step, batch, features, following, found.counts, limits,
            self._sampler_of([req.sampling for req in step.reqs])))
        assert len(drafted) == len(step.sample_index)
        return {index: drafts for index, drafts in zip(step.sample_index, drafted) if drafts is not None}

    @torch.inference_mode()
    def run_prompt(self, step: StepInput, device: torch.device) -> Drafts | None:
        """Runs it on a chunk of a prompt (``step_input.draft_step``) that the model has not computed here; the drafter
        reads tokens alone. Returns the drafts after the chunk's last token, where that samples."""
        assert self.features is None, "the model's hidden states of the prompt are not here"
        (chunk,) = step.chunks
        batch = ForwardBatch.from_columns(step.columns, TokenIds(step.known_tokens), device)
        following = chunk.req.tokens.view(chunk.start + 1, chunk.stop + 1).astype(np.int64)
        found = self._drafter.run(DraftStep(
            step, batch, None, upload_joined([following], torch.int64, device), [1] * len(step.sample_index),
            list(step.draft_limits), CoupledDraftSampler([chunk.req.sampling], self._tp)))
        return found[0] if found else None

    def _sampler_of(self, params: list[SamplingParams]) -> CoupledDraftSampler:
        if params != self._params:  # identity is compared first: an unchanged batch costs microseconds
            self._params, self._sampler = params, CoupledDraftSampler(params, self._tp)
        return self._sampler


class ComputedStep(NamedTuple):
    """A step that the model computes as ``batch``, with its ``samples`` [S] int64 and the ``features`` [T, F] that the
    drafter reads."""

    step: StepInput
    batch: ForwardBatch
    features: torch.Tensor | None
    samples: torch.Tensor


def next_ids(step: StepInput, batch: ForwardBatch, samples: torch.Tensor) -> torch.Tensor:
    """Returns the token [T] int64 that follows each row of a step: the prompt's next one, or the sample [S] of the
    row."""
    if len(samples) == step.num_tokens:
        return samples
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
