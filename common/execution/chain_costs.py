"""The cost of captured chain steps: their verification, and their drafter's passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ..forward.chain_rows import ChainLevels, ChainRows
from ..forward.forward_batch import indptr_of
from ..request.req import Req
from ..runner.model_runner import ModelRunner

_TIMES = 3


class ChainCosts(NamedTuple):
    """Seconds by the number of rows: of verification, of one pass of the drafter, and of plain chain steps, where they
    are captured."""

    verify: dict[int, float]
    draft: dict[int, float]
    plain: dict[int, float]


def measure_chains(runner: ModelRunner, levels: ChainLevels, reqs: Sequence[Req], sizes: Sequence[int],
                   position: int) -> ChainCosts:
    """Times chain steps of the first ``sizes`` requests of ``reqs``, whose newest tokens are at ``position``, with the
    least and the most drafts that are captured. Without the least (one) it knows no single pass, and takes those of a
    step to be alike."""
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}
    plain: dict[int, float] = {}
    if levels.has_plain:
        plain = {size: sum(_step_seconds(runner, reqs[:size], _rows(reqs[:size], 1, position)))
                 for size in sizes if size <= levels.max_requests[0]}
    first = int(levels.has_plain)
    for level in sorted({first, len(levels.num_drafts) - 1}):
        num_drafts = levels.num_drafts[level]
        for size in (size for size in sizes if size <= levels.max_requests[level]):
            chains = _rows(reqs[:size], num_drafts + 1, position)
            rows = size * (num_drafts + 1)
            verify[rows], passes = _step_seconds(runner, reqs[:size], chains)
            if num_drafts == 1 or level == first:
                draft[rows] = passes / num_drafts
            else:  # one pass of all rows, the others of a row for each request
                known = sorted(draft)
                single = float(np.interp(size, known, [draft[each] for each in known]))
                draft[rows] = max(draft.get(rows, 0.0), passes - (num_drafts - 1) * single)
    return ChainCosts(verify, draft, plain)


def _rows(reqs: Sequence[Req], width: int, position: int) -> ChainRows:
    ids = [req.page_table.ids for req in reqs if req.page_table is not None]
    none = np.zeros(len(reqs), np.int64)
    return ChainRows(width, none - 1, none + position, np.zeros((len(reqs), width), np.int64), none + (width - 1),
                     none + (position + width), indptr_of(np.array([len(each) for each in ids])),
                     np.concatenate(ids).astype(np.int32))


def _step_seconds(runner: ModelRunner, reqs: Sequence[Req], chains: ChainRows) -> tuple[float, float]:
    """The times of a step's verification, and of all passes of its drafter."""
    def step() -> None:
        runner.draft_chains(runner.verify_chains(chains), reqs, greedy=True)

    verify = _seconds(runner, partial(runner.verify_chains, chains))
    return verify, max(0.0, _seconds(runner, step) - verify)


def _seconds(runner: ModelRunner, run: Callable[[], object]) -> float:
    """The least time of a run among several that follow each other without a wait."""
    run()
    found = []
    for _ in range(2):
        _synchronize(runner.device)
        begin = time.perf_counter()
        for _ in range(_TIMES):
            run()
        _synchronize(runner.device)
        found.append((time.perf_counter() - begin) / _TIMES)
    return min(found)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
