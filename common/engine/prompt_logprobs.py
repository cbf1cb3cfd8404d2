"""Log-probabilities of prompts: gathered chunk by chunk, as the rows that predict their tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..api.messages import Logprobs
from .batcher import Batch
from .host_copies import upload
from .req import Req
from .token_logprobs import LogprobReport, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PromptRow:
    """Row ``index`` of the batch predicts prompt token ``position`` of ``req``."""

    req: Req
    index: int
    position: int


def prompt_rows(batch: Batch) -> list[PromptRow]:
    """The rows of the batch that predict prompt tokens whose log-probability is wanted, in order."""
    rows, offset = [], 0
    for chunk in batch.chunks:
        req = chunk.req
        if req.logprob_start is not None:
            if req.prompt_logprobs is None:
                req.prompt_logprobs = _begun(req)
            wanted = req.logprob_start + len(req.prompt_logprobs.values)
            for position in range(max(wanted, chunk.start + 1), min(chunk.stop + 1, req.num_prompt_tokens)):
                rows.append(PromptRow(req, offset + position - 1 - chunk.start, position))
        offset += chunk.stop - chunk.start
    return rows


def _begun(req: Req) -> Logprobs:
    """Nothing precedes the first token, so it has no log-probability."""
    return Logprobs([int(req.prompt[0])], [None], [[]], [[]]) if req.logprob_start == 0 else Logprobs([], [], [], [])


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
        for row, token_id, found in zip(self._rows, self._token_ids, self._report.wait()):
            kept = row.req.prompt_logprobs
            assert kept is not None and found is not None
            append(kept, token_id, found)


def append(kept: Logprobs, token_id: int, found: TokenLogprob) -> None:
    kept.token_ids.append(token_id)
    kept.values.append(found.value)
    kept.top.append(found.top)
    kept.of_ids.append(found.of_ids)
