"""The cost of steps with drafts, measured by steps of requests that nobody has sent."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..api.drafts import Drafts
from ..api.messages import Generate
from ..api.sampling import SamplingParams
from ..kvcache.manager import KVCacheManager
from ..request.req import Req
from ..request.step_input import Chunk, DraftPlan, StepInput, chunk_step
from ..speculative.draft_length import CostTable
from .executor import Executor

_SIZES = (1, 4, 16, 64, 256)
_CONTEXT = 16
_TIMES = 3


def measure_costs(executor: Executor, cache: KVCacheManager, max_requests: int, max_drafts: int, *,
                  on_device: bool) -> CostTable:
    """Returns the seconds of steps with up to ``max_drafts`` drafts of up to ``max_requests`` requests, as far as the
    cache has pages. All ranks must call it together, before there are requests. ``on_device``: a drafter drafts."""
    pages = cache.pages_for(_CONTEXT + 2 * max_drafts + 2)
    most = max(1, min(max_requests, _SIZES[-1], cache.num_available // pages))
    reqs = [_request(cache, number, pages * cache.page_size) for number in range(most)]
    try:
        return _measured(_Steps(executor, cache.page_size, on_device), reqs, max_drafts)
    finally:
        for req in reqs:
            assert req.page_table is not None
            cache.release(req.page_table)


def _measured(steps: _Steps, reqs: Sequence[Req], max_drafts: int) -> CostTable:
    sizes = sorted({*(size for size in _SIZES if size < len(reqs)), len(reqs)})
    plain = {size: steps.seconds(reqs[:size], 0) for size in sizes}
    verify = {1: plain[1]} | {size * (max_drafts + 1): steps.seconds(reqs[:size], max_drafts) for size in sizes}
    draft = dict.fromkeys((1, 2), 0.0)
    if steps.on_device:
        draft = {size: max(0.0, steps.seconds(reqs[:size], 0, drafts_after=True) - plain[size]) for size in sizes}
        rows = sizes[-1] * (max_drafts + 1)
        draft[rows] = max(draft[sizes[-1]], steps.seconds(reqs, max_drafts, drafts_after=True) - verify[rows])
    rows_measured = sorted({*plain, *verify, *draft})
    return CostTable(tuple(rows_measured), _at(rows_measured, plain), _at(rows_measured, verify),
                     _at(rows_measured, draft))


def _at(rows: Sequence[int], found: dict[int, float]) -> tuple[float, ...]:
    """The measured times at all ``rows``, linear between; they never fall with more rows."""
    known = sorted(found)
    values = np.maximum.accumulate([found[size] for size in known])
    return tuple(np.interp(rows, known, values).tolist())


class _Steps:
    """Times steps of requests whose drafts are all the first token."""

    def __init__(self, executor: Executor, page_size: int, on_device: bool):
        self._executor = executor
        self._page_size = page_size
        self.on_device = on_device

    def seconds(self, reqs: Sequence[Req], num_drafts: int, *, drafts_after: bool = False) -> float:
        """The least time of a step that verifies ``num_drafts`` drafts of each request; ``drafts_after``: and drafts
        one more."""
        for req in reqs:
            req.draft_gap = not drafts_after
        return min(self._run(self._step(reqs, num_drafts, drafts_after)) for _ in range(_TIMES))

    def _step(self, reqs: Sequence[Req], num_drafts: int, drafts_after: bool) -> StepInput:
        drafts = {row: Drafts((0,) * num_drafts) for row in range(len(reqs))} if num_drafts else {}
        plan = DraftPlan(drafts, np.full(len(reqs), num_drafts), [int(drafts_after)] * len(reqs))
        chunks = [Chunk(req, _CONTEXT - 1, _CONTEXT, True) for req in reqs]
        return chunk_step(chunks, 0, self._page_size, None, plan)

    def _run(self, step: StepInput) -> float:
        begin = time.perf_counter()
        self._executor.launch(step).wait()
        return time.perf_counter() - begin


def _request(cache: KVCacheManager, number: int, num_tokens: int) -> Req:
    message = Generate(f"cost-{number}", [0] * _CONTEXT, SamplingParams(temperature=0.0, max_new_tokens=num_tokens))
    req = Req.from_message(message, eos_ids=frozenset(), now=0.0, timeout=1.0)
    req.page_table = cache.new_private_table()
    if not cache.allocate_next(req.page_table, num_tokens):
        raise AssertionError("an idle cache has these pages")
    return req
