"""Prompt log-probabilities: collected chunk by chunk, as the rows that predict prompt tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..api.messages import Logprobs
from ..forward.host_copies import upload
from ..request.batch import ScheduledBatch
from ..request.req import Req
from .token_logprobs import LogprobReport, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class PromptRow:
    """Row ``index`` of the batch predicts prompt token ``position`` of ``req``."""

    req: Req
    index: int
    position: int


def prompt_rows(batch: ScheduledBatch) -> list[PromptRow]:
    """Returns the rows of the batch that predict prompt tokens whose log-probability is requested, in order."""
    rows, offset = [], 0
    for chunk in batch.chunks:
        req = chunk.req
        if req.logprob_start is not None:
            next_position = req.logprob_start + len(begin(req).values)
            for position in range(max(next_position, chunk.start + 1), min(chunk.stop + 1, req.num_prompt_tokens)):
                rows.append(PromptRow(req, offset + position - 1 - chunk.start, position))
        offset += chunk.stop - chunk.start
    return rows


def begin(req: Req) -> Logprobs:
    """Returns the request's ``prompt_logprobs``, initialised where there are none yet.

    No token precedes the first one, so it has no log-probability.
    """
    if req.prompt_logprobs is None:
        first = [int(req.prompt[0])] if req.logprob_start == 0 else []
        req.prompt_logprobs = Logprobs(first, [None for _ in first], [[] for _ in first], [[] for _ in first])
    return req.prompt_logprobs


class PromptReport:
    """Log-probabilities of ``rows``, whose logits [len(rows), vocab] the device is computing: the model's own, without
    temperature."""

    def __init__(self, rows: Sequence[PromptRow], logits: torch.Tensor):
        self._rows = rows
        self._token_ids = [int(row.req.prompt[row.position]) for row in rows]
        tokens = upload(self._token_ids, torch.int64, logits.device)
        self._report = LogprobReport(logits, tokens, [row.req.logprobs for row in rows])

    def append_to_requests(self) -> None:
        """Waits for the values, and appends them to ``prompt_logprobs`` of the rows' requests."""
        for row, token_id, logprob in self.wait():
            append(begin(row.req), token_id, logprob)

    def wait(self) -> Iterator[tuple[PromptRow, int, TokenLogprob]]:
        """Waits for the values; yields each row, its token and its log-probability."""
        for row, token_id, logprob in zip(self._rows, self._token_ids, self._report.wait()):
            assert logprob is not None
            yield row, token_id, logprob


def append(logprobs: Logprobs, token_id: int, logprob: TokenLogprob) -> None:
    logprobs.token_ids.append(token_id)
    logprobs.values.append(logprob.value)
    logprobs.top.append(logprob.top)
    logprobs.of_ids.append(logprob.of_ids)
