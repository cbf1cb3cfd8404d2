"""Applies the logit processors of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..forward.host_copies import upload
from ..request.logit_processors import PARAM, RowProcessor, summarize
from ..request.sampling_metadata import SamplingMetadata


def apply_processors(logits: torch.Tensor, rows: Sequence[SamplingMetadata],
                     previous: torch.Tensor | None) -> dict[int, str]:
    """Applies the processors of ``rows`` to their logits [R, vocab], in place; returns why rows have failed, by row.

    ``previous`` holds the tokens that the step before sampled, for rows with a pending one.
    """
    by_path: dict[str, list[tuple[int, RowProcessor]]] = {}
    for i, row in enumerate(rows):
        if row.processor is not None:
            row.processor.tokens.pending = None if row.pending is None or previous is None else previous[row.pending]
            by_path.setdefault(row.processor.path, []).append((i, row.processor))
    failed: dict[int, str] = {}
    for members in by_path.values():
        failed |= _apply(logits, members)
    return failed


def _apply(logits: torch.Tensor, members: list[tuple[int, RowProcessor]]) -> dict[int, str]:
    first = members[0][1]
    index = upload([i for i, _ in members], torch.int64, logits.device)
    selected = logits[index]
    try:
        result = first.processor(selected, [one.params for _, one in members])
        if not isinstance(result, torch.Tensor) or result.shape != selected.shape:
            raise TypeError(f"it returned {_shape(result)} in place of logits of shape {list(selected.shape)}")
        logits[index] = result.to(logits)
    except Exception as error:
        if len(members) == 1:
            return {members[0][0]: f"{PARAM} {first.path!r} failed: {summarize(error)}."}
    else:
        return {}
    alone = [_apply(logits, [member]) for member in members]  # one request's parameters must not fail another's
    return {i: reason for failed in alone for i, reason in failed.items()}


def _shape(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {list(result.shape)}"
    return f"a {type(result).__name__}"
