"""Accepted rows of steps whose drafts are trees: where their keys and values go, and the step as if they were all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from ..forward.forward_batch import BatchColumns, ForwardBatch, indptr_of
from ..forward.host_copies import upload_joined
from ..request.step_input import StepInput, StepTokens
from ..speculative.verify import accepted_rows


class Accepted(NamedTuple):
    """The accepted rows of a step: ``counts`` of the requests in ``step.sample_index``, ``rows``, and their samples
    ``tokens``."""

    counts: list[int]
    rows: Sequence[int]
    tokens: list[int]


def accepted(step: StepInput, token_ids: list[int]) -> Accepted:
    """Returns the rows of a step that are accepted; ``token_ids`` [S] are their samples."""
    if not step.drafts:
        return Accepted([1] * len(step.sample_index), range(len(token_ids)), token_ids)
    sizes, drafts = step.num_samples.tolist(), step.drafts
    if len(step.sample_index) < len(step):
        sizes = [sizes[index] for index in step.sample_index]
        drafts = {place: drafts[index] for place, index in enumerate(step.sample_index) if index in drafts}
    counts, rows = accepted_rows(token_ids, sizes, drafts)
    return Accepted(counts, rows, [token_ids[row] for row in rows])


def paths_to_move(step: StepInput, found: Accepted,
                  device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns ``first_rows`` and ``paths`` of ``move_slots`` for the requests whose accepted rows do not follow each
    other; None where there are none. All rows of the step are sampled."""
    firsts, paths = [], []
    end = 0
    for count in found.counts:
        path = found.rows[end:end + count]
        end += count
        if path[-1] - path[0] >= count:
            firsts.append(path[0])
            paths.append(path)
    if not paths:
        return None
    padded = np.full((len(paths), max(map(len, paths))), step.num_tokens, np.int64)
    for row, path in enumerate(paths):
        padded[row, :len(path)] = path
    moved = upload_joined([np.array(firsts, np.int64), padded.ravel()], torch.int64, device)
    return moved[:len(firsts)], moved[len(firsts):].view(padded.shape)


def accepted_step(step: StepInput, found: Accepted) -> StepInput:
    """Returns ``step``, all of whose rows are sampled, with the rows ``found`` only, as chains in the slots to which
    they were moved, in the first cache group."""
    columns, (lengths, kept) = step.columns, (np.array(column, np.int64) for column in (found.counts, found.rows))
    qo_indptr = indptr_of(lengths)
    slots = np.arange(len(kept)) + np.repeat(columns.qo_indptr[:-1] - qo_indptr[:-1], lengths)
    ends, begun = slots[qo_indptr[1:] - 1], np.cumsum(columns.offset_in_page == 0)
    pages = np.diff(columns.kv_indptr) - (begun[columns.qo_indptr[1:] - 1] - begun[ends])
    kv_indptr = indptr_of(pages)
    indices = np.arange(kv_indptr[-1]) + np.repeat(columns.kv_indptr[:-1] - kv_indptr[:-1], pages)
    chains = BatchColumns(columns.positions[kept], columns.page_of_token[slots], columns.offset_in_page[slots],
                          kv_indptr, columns.kv_indices[indices],
                          (columns.offset_in_page[ends] + 1).astype(np.int32), None, qo_indptr, int(lengths.max()),
                          verifies=True)
    return msgspec.structs.replace(
        step, columns=chains, q_lens=lengths, num_samples=lengths, tokens=StepTokens(step.known_tokens[kept]),
        sampling=[step.sampling[row] for row in found.rows], drafts={})


def accepted_batch(step: StepInput, batch: ForwardBatch, rows: torch.Tensor) -> ForwardBatch:
    """Returns the batch of an ``accepted_step``, whose tokens are those of ``rows`` [n] of ``batch``."""
    return ForwardBatch.from_columns(step.columns, batch.input_ids[rows], batch.input_ids.device)
