"""Running the logit processors of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..forward.host_copies import upload
from ..request.logit_processors import PARAM, RowProcessor, summarize
from ..request.sampling_metadata import SamplingMetadata


def process(logits: torch.Tensor, rows: Sequence[SamplingMetadata], previous: torch.Tensor | None) -> dict[int, str]:
    """Run the processors of ``rows`` on their logits [R, vocab], in place; returns why rows have failed, by row.

    ``previous`` holds the tokens that the step before chose, for rows with a pending one.
    """
    groups: dict[str, list[tuple[int, RowProcessor]]] = {}
    for i, row in enumerate(rows):
        if row.processor is not None:
            row.processor.tokens.pending = None if row.pending is None or previous is None else previous[row.pending]
            groups.setdefault(row.processor.path, []).append((i, row.processor))
    failed: dict[int, str] = {}
    for members in groups.values():
        failed |= _run(logits, members)
    return failed


def _run(logits: torch.Tensor, members: list[tuple[int, RowProcessor]]) -> dict[int, str]:
    first = members[0][1]
    index = upload([i for i, _ in members], torch.int64, logits.device)
    given = logits[index]
    try:
        made = first.processor(given, [one.params for _, one in members])
        if not isinstance(made, torch.Tensor) or made.shape != given.shape:
            raise TypeError(f"it returned {_shape(made)} in place of logits of shape {list(given.shape)}")
        logits[index] = made.to(logits)
    except Exception as error:
        if len(members) == 1:
            return {members[0][0]: f"{PARAM} {first.path!r} failed: {summarize(error)}."}
    else:
        return {}
    alone = [_run(logits, [member]) for member in members]  # one request's parameters must not fail another's
    return {i: reason for failed in alone for i, reason in failed.items()}


def _shape(made: object) -> str:
    return f"a tensor of shape {list(made.shape)}" if isinstance(made, torch.Tensor) else f"a {type(made).__name__}"
