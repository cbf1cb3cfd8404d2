"""Samples of a step as simulated acceptance has them: those that accept the drawn number of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..api.drafts import Drafts
from ..forward.host_copies import upload_joined
from ..request.step_input import StepInput
from ..sampling.sampled_tokens import SampledTokenBuffers
from ..speculative.simulated import SimulatedAcceptance, first_path

if TYPE_CHECKING:
    from ..sampling.sampler import Sample


class SimulatedSamples:
    """Replaces samples of rows with drafts: on the accepted path by the drafts, at its end by none of them."""

    def __init__(self, acceptance: SimulatedAcceptance):
        self._acceptance = acceptance
        self._buffers = SampledTokenBuffers()

    def replace(self, step: StepInput, sample: Sample) -> Sample:
        """Returns the samples of a step with drafts, as ``sample`` otherwise."""
        plan = self._plan(step)
        forced, others, *avoided = upload_joined(plan, torch.int64, sample.tokens.device).view(len(plan), -1)
        tokens = sample.tokens
        for avoid in avoided:
            tokens = torch.where(tokens == avoid, others, tokens)
        tokens = torch.where(forced >= 0, forced, tokens)
        return sample._replace(tokens=tokens, copied=self._buffers.copy(tokens), is_argmax=False)

    def _plan(self, step: StepInput) -> list[np.ndarray]:
        """Returns arrays [S], with -1 for rows without: the sample that a row is to have; another one than those that
        it must not have; and these, the first of each row, the second and so on."""
        indices = list(step.drafts)
        reqs = [step.reqs[index] for index in indices]
        counts = self._acceptance.count([req.rid for req in reqs], step.starts[indices],
                                        np.array([len(step.drafts[index]) for index in indices], np.int64))
        begins = np.cumsum(step.num_samples) - step.num_samples
        forced = np.full(int(step.num_samples.sum()), -1, np.int64)
        others = np.full(len(forced), -1, np.int64)
        avoided: list[np.ndarray] = []
        for index, count in zip(indices, counts.tolist()):
            drafts, begin = step.drafts[index], int(begins[index])
            row = begin
            last = -1
            for place in first_path(drafts, count):
                forced[row] = drafts.tokens[place]
                row, last = begin + 1 + place, place
            children = _children(drafts, last)
            others[row] = next(token for token in range(len(children) + 1) if token not in children)
            for number, token in enumerate(children):
                if number == len(avoided):
                    avoided.append(np.full(len(forced), -1, np.int64))
                avoided[number][row] = token
        return [forced, others, *avoided]


def _children(drafts: Drafts, last: int) -> list[int]:
    """The tokens of the drafts that follow draft ``last``, or the newest token (-1)."""
    if drafts.parents is None:
        return [drafts.tokens[last + 1]] if last + 1 < len(drafts.tokens) else []
    return [token for token, parent in zip(drafts.tokens, drafts.parents) if parent == last]
