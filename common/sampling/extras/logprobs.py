"""Log-probabilities of prompt or sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....kernels.tuning.policy import policy_of
from ...api.messages import Logprobs
from ...forward.host_copies import Download, upload
from ...request.extras import EXTRAS, Extra
from ...request.sampling_metadata import RequestedLogprobs
from ...request.step_output import RowOutput

LOGPROBS = EXTRAS.register("logprobs")(Extra(
    frozenset(("logprobs",)), lambda req: req.logprobs is not None, 90, lambda req, state: req.logprobs))

Pairs = list[tuple[int, float]]
"""``(token id, log-probability)``."""


class TokenLogprob(NamedTuple):
    """The log-probability of a token, those of the top tokens of its row, and those of requested ids."""

    value: float
    top: Pairs
    of_ids: Pairs


class LogprobReport:
    """Log-probabilities of some rows, being copied to the host."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, requested: Sequence[RequestedLogprobs]):
        """``requested[i]`` is what to report of ``tokens[i]``, whose row is ``logits[i]`` [R, vocab] float32; at least
        one."""
        self._requested = requested
        logprobs = logits.log_softmax(-1)
        num_top = min(max(one.num_top for one in requested), logits.shape[-1])
        values, ids = _top(logprobs, num_top)
        tensors = [tokens, logprobs.gather(-1, tokens[:, None])[:, 0], values, ids]
        pairs = [(i, token) for i, one in enumerate(requested) for token in one.token_ids]
        if pairs:
            rows, listed = upload(pairs, torch.int64, logits.device).unbind(-1)
            tensors.append(logprobs[rows, listed])
        self._download = Download(tensors)

    def wait(self) -> list[tuple[int, TokenLogprob]]:
        """Waits for the values; returns the token of each row with its log-probability."""
        tokens, values, top_values, top_ids, *rest = self._download.wait()
        listed = iter(rest[0] if rest else ())
        return [(tokens[i], TokenLogprob(values[i], list(zip(top_ids[i], top_values[i]))[:one.num_top],
                                         _pairs(one, listed))) for i, one in enumerate(self._requested)]


def _top(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest values of each row, [R, count], and their ids. Which of equal ones are the largest depends on
    ``count``, the most that a row of the batch asks for; under a batch-invariant policy those of the smallest ids are.
    """
    if not policy_of(logprobs.device).batch_invariant:
        values, ids = logprobs.topk(count, dim=-1)
        return values, ids
    # No value is above 0: the larger the bits of a negative number, the smaller it is.
    order = -logprobs.view(torch.int32).to(torch.int64).bitwise_and_(0x7FFFFFFF)
    keys = (order << 32) - torch.arange(logprobs.shape[-1], device=logprobs.device)
    ids = keys.topk(count, dim=-1).indices
    return logprobs.gather(-1, ids), ids


class SampledLogprobs:
    """The report of sampled tokens' log-probabilities; ``index`` [R] has the rows' requests."""

    def __init__(self, report: LogprobReport, index: Sequence[int]):
        self._report = report
        self._index = index

    def add_to(self, outputs: dict[int, RowOutput]) -> None:
        for index, (token_id, logprob) in zip(self._index, self._report.wait()):
            output = outputs.setdefault(index, RowOutput())
            if output.logprobs is None:
                output.logprobs = Logprobs([], [], [], [])
            append(output.logprobs, token_id, logprob)


def append(logprobs: Logprobs, token_id: int, logprob: TokenLogprob) -> None:
    logprobs.token_ids.append(token_id)
    logprobs.values.append(logprob.value)
    logprobs.top.append(logprob.top)
    logprobs.of_ids.append(logprob.of_ids)


def _pairs(requested: RequestedLogprobs, listed: Any) -> Pairs:
    return [(token, next(listed)) for token in requested.token_ids]
