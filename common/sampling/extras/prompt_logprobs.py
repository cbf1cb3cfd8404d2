"""Prompt log-probabilities: collected chunk by chunk, as the rows that predict prompt tokens are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...api.messages import Logprobs
from ...forward.host_copies import upload
from ...request.extras import EXTRAS, Extra
from ...request.sampling_metadata import RequestedLogprobs
from ...request.step_input import StepInput
from ...request.step_output import RowOutput
from .logprobs import LogprobReport, append

PROMPT_LOGPROBS = EXTRAS.register("prompt_logprobs")(Extra(
    frozenset(("logprob_start", "prompt_logprobs")), lambda req: req.logprob_start is not None))


class PromptRow(NamedTuple):
    """Token row ``row`` of a step predicts token ``token_id`` of the prompt of its request ``request``."""

    request: int
    row: int
    token_id: int
    requested: RequestedLogprobs


def prompt_rows(step: StepInput) -> list[PromptRow]:
    """Returns the rows of a step that predict prompt tokens whose log-probability is requested, in order."""
    rows = []
    for index in step.extra_index:
        req = step.reqs[index]
        if index >= step.num_prefill or req.logprob_start is None:
            continue
        start, first = int(step.starts[index]), int(step.columns.qo_indptr[index])
        stop = start + int(step.q_lens[index])
        next_position = req.logprob_start + len(req.begin_prompt_logprobs().values)
        for position in range(max(next_position, start + 1), min(stop + 1, req.num_prompt_tokens)):
            assert req.logprobs is not None
            rows.append(PromptRow(index, first + position - 1 - start, int(req.prompt[position]), req.logprobs))
    return rows


class PromptReport:
    """Log-probabilities of ``rows``, whose logits [len(rows), vocab] the device is computing: the model's own, without
    temperature."""

    def __init__(self, rows: Sequence[PromptRow], logits: torch.Tensor):
        self._rows = rows
        tokens = upload([row.token_id for row in rows], torch.int64, logits.device)
        self._report = LogprobReport(logits.float(), tokens, [row.requested for row in rows])

    def add_to(self, outputs: dict[int, RowOutput]) -> None:
        for row, (token_id, logprob) in zip(self._rows, self._report.wait()):
            output = outputs.setdefault(row.request, RowOutput())
            if output.prompt_logprobs is None:
                output.prompt_logprobs = Logprobs([], [], [], [])
            append(output.prompt_logprobs, token_id, logprob)
