"""Log-probabilities of the tokens that a batch's rows hold or choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..forward.host_copies import Download, upload
from ..request.sampling_metadata import RequestedLogprobs

Pairs = list[tuple[int, float]]
"""``(token id, log-probability)``."""


class TokenLogprob(NamedTuple):
    """Of one token: its own, the likeliest tokens' in its place, and those of the ids that were asked for."""

    value: float
    top: Pairs
    of_ids: Pairs


class LogprobReport:
    """Log-probabilities of some rows, on their way to the host."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[RequestedLogprobs | None]):
        """``wanted[i]`` says what to tell of ``tokens[i]``, whose distribution is ``logits[i]`` [R, vocab]."""
        self._size = len(wanted)
        self._asking = [(row, one) for row, one in enumerate(wanted) if one is not None]
        if not self._asking:
            return
        if len(self._asking) < self._size:
            index = upload([row for row, _ in self._asking], torch.int64, logits.device)
            logits, tokens = logits[index], tokens[index]
        scores = logits.log_softmax(-1)
        most = min(max(one.num_top for _, one in self._asking), logits.shape[-1])
        values, ids = scores.topk(most, dim=-1)
        tensors = [scores.gather(-1, tokens[:, None])[:, 0], values, ids]
        pairs = [(i, token) for i, (_, one) in enumerate(self._asking) for token in one.token_ids]
        if pairs:
            rows, listed = upload(pairs, torch.int64, logits.device).unbind(-1)
            tensors.append(scores[rows, listed])
        self._download = Download(tensors)

    def wait(self) -> list[TokenLogprob | None]:
        """One entry a row, None where nothing was asked."""
        found: list[TokenLogprob | None] = [None] * self._size
        if not self._asking:
            return found
        values, top_values, top_ids, *rest = self._download.wait()
        listed = iter(rest[0] if rest else ())
        for i, (row, one) in enumerate(self._asking):
            top = list(zip(top_ids[i], top_values[i]))[:one.num_top]
            found[row] = TokenLogprob(values[i], top, _pairs(one, listed))
        return found


def _pairs(wanted: RequestedLogprobs, listed: Any) -> Pairs:
    return [(token, next(listed)) for token in wanted.token_ids]
