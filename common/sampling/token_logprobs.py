"""Log-probabilities of a batch's prompt or sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..forward.host_copies import Download, upload
from ..request.sampling_metadata import RequestedLogprobs

Pairs = list[tuple[int, float]]
"""``(token id, log-probability)``."""


class TokenLogprob(NamedTuple):
    """The log-probability of a token, those of the top tokens of its row, and those of requested ids."""

    value: float
    top: Pairs
    of_ids: Pairs


class LogprobReport:
    """Log-probabilities of some rows, being copied to the host."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, requested: Sequence[RequestedLogprobs | None]):
        """``requested[i]`` is what to report of ``tokens[i]``, whose row is ``logits[i]`` [R, vocab]."""
        self._size = len(requested)
        self._requested = [(row, one) for row, one in enumerate(requested) if one is not None]
        if not self._requested:
            return
        if len(self._requested) < self._size:
            index = upload([row for row, _ in self._requested], torch.int64, logits.device)
            logits, tokens = logits[index], tokens[index]
        logprobs = logits.log_softmax(-1)
        num_top = min(max(one.num_top for _, one in self._requested), logits.shape[-1])
        values, ids = logprobs.topk(num_top, dim=-1)
        tensors = [logprobs.gather(-1, tokens[:, None])[:, 0], values, ids]
        pairs = [(i, token) for i, (_, one) in enumerate(self._requested) for token in one.token_ids]
        if pairs:
            rows, listed = upload(pairs, torch.int64, logits.device).unbind(-1)
            tensors.append(logprobs[rows, listed])
        self._download = Download(tensors)

    def wait(self) -> list[TokenLogprob | None]:
        """Waits for the values; returns one entry a row, None where nothing was requested."""
        result: list[TokenLogprob | None] = [None] * self._size
        if not self._requested:
            return result
        values, top_values, top_ids, *rest = self._download.wait()
        listed = iter(rest[0] if rest else ())
        for i, (row, one) in enumerate(self._requested):
            top = list(zip(top_ids[i], top_values[i]))[:one.num_top]
            result[row] = TokenLogprob(values[i], top, _pairs(one, listed))
        return result


def _pairs(requested: RequestedLogprobs, listed: Any) -> Pairs:
    return [(token, next(listed)) for token in requested.token_ids]
