"""Logit processors: apply those that requests name to their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...forward.host_copies import upload
from ...request.extras import EXTRAS, Extra, Members, RowState
from ...request.logit_processors import PARAM, RowProcessor, summarize
from ...request.req import Req


class PendingProcessor(NamedTuple):
    """A row's processor; ``pending``: see RowState."""

    processor: RowProcessor
    pending: int | None = None


def apply_processors(logits: torch.Tensor, members: Members, previous: torch.Tensor | None) -> dict[int, str]:
    """Applies the PendingProcessor of each member to its row of ``logits`` [R, vocab], in place; returns why rows have
    failed, by row.

    ``previous`` holds the tokens that the step before sampled, for rows with a pending one.
    """
    by_path: dict[str, list[tuple[int, RowProcessor]]] = {}
    for row, (processor, pending) in members:
        processor.tokens.pending = None if pending is None or previous is None else previous[pending]
        by_path.setdefault(processor.path, []).append((row, processor))
    failed: dict[int, str] = {}
    for same in by_path.values():
        failed |= _apply(logits, same)
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


def _processor(req: Req, state: RowState) -> PendingProcessor | None:
    return None if req.processor is None else PendingProcessor(req.processor, state.pending)


PROCESSOR = EXTRAS.register("custom_logit_processor")(Extra(
    frozenset(("processor",)), lambda req: req.processor is not None, 50, _processor, apply_processors))
