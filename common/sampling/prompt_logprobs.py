"""Log-probabilities of prompts: gathered chunk by chunk, as the rows that predict their tokens are computed."""

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
    """The rows of the batch that predict prompt tokens whose log-probability is wanted, in order."""
    rows, offset = [], 0
    for chunk in batch.chunks:
        req = chunk.req
        if req.logprob_start is not None:
            wanted = req.logprob_start + len(begin(req).values)
            for position in range(max(wanted, chunk.start + 1), min(chunk.stop + 1, req.num_prompt_tokens)):
                rows.append(PromptRow(req, offset + position - 1 - chunk.start, position))
        offset += chunk.stop - chunk.start
    return rows


def begin(req: Req) -> Logprobs:
    """The request's ``prompt_logprobs``, begun where there are none yet.

    Nothing precedes the first token, so it has no log-probability.
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

    def take_in(self) -> None:
        """Wait, and append to ``prompt_logprobs`` of the rows' requests."""
        for row, token_id, found in self.found():
            append(begin(row.req), token_id, found)

    def found(self) -> Iterator[tuple[PromptRow, int, TokenLogprob]]:
        """Wait; of each row its token, and what is to be told."""
        for row, token_id, found in zip(self._rows, self._token_ids, self._report.wait()):
            assert found is not None
            yield row, token_id, found


def append(kept: Logprobs, token_id: int, found: TokenLogprob) -> None:
    kept.token_ids.append(token_id)
    kept.values.append(found.value)
    kept.top.append(found.top)
    kept.of_ids.append(found.of_ids)
