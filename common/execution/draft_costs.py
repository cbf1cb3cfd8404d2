"""The cost of steps with drafts, measured by steps of requests that nobody has sent."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from ..api.drafts import Drafts
from ..api.messages import Generate
from ..api.sampling import SamplingParams
from ..kvcache.manager import KVCacheManager
from ..request.req import Req
from ..request.step_input import Chunk, DraftPlan, StepInput, chunk_step
from ..runner.model_runner import ModelRunner
from ..speculative.draft_length import CostTable
from .chain_costs import measure_chains
from .executor import Executor

_SIZES = (1, 4, 16, 64, 256)
_CONTEXT = 16
_LONG_CONTEXT = 2048
_LONG_SIZE = 16
"""Requests of a long context in the step that shows what attention costs."""
_TIMES = 3


def measure_costs(executor: Executor, runner: ModelRunner, cache: KVCacheManager, max_requests: int, max_drafts: int, *,
                  on_device: bool) -> CostTable:
    """Returns the seconds of steps with up to ``max_drafts`` drafts of up to ``max_requests`` requests, as far as the
    cache has pages. All ranks must call it together, before there are requests. ``on_device``: a drafter drafts."""
    pages = cache.pages_for(_CONTEXT + 2 * max_drafts + 2)
    most = max(1, min(max_requests, _SIZES[-1], cache.num_available // pages))
    steps = _Steps(executor, cache.page_size, on_device)
    reqs = _requests(cache, most, pages * cache.page_size)
    try:
        costs = _measured(steps, runner, reqs, max_drafts)
    finally:
        _release(cache, reqs)
    return msgspec.structs.replace(costs, context_seconds=_context_seconds(steps, runner, cache, costs, most))


def _context_seconds(steps: _Steps, runner: ModelRunner, cache: KVCacheManager, costs: CostTable, most: int) -> float:
    """Returns the seconds of each token that a plain step reads beyond those of a short context: 0 where there is no
    room for a long one, or where windows forget it."""
    size = min(most, _LONG_SIZE)
    length = min(_LONG_CONTEXT, runner.spec.context_length - 1,
                 cache.num_available // size * cache.page_size - 1) // cache.page_size * cache.page_size
    if cache.groups or length < 4 * _CONTEXT:
        return 0.0
    reqs = _requests(cache, size, length)
    try:
        seconds = steps.seconds(reqs, 0, context=length)
    finally:
        _release(cache, reqs)
    before = float(np.interp(size, costs.rows, costs.plain))
    return max(0.0, seconds - before) / (size * (length - _CONTEXT))


def _measured(steps: _Steps, runner: ModelRunner, reqs: Sequence[Req], max_drafts: int) -> CostTable:
    sizes = sorted({*(size for size in _SIZES if size < len(reqs)), len(reqs)})
    plain = {size: steps.seconds(reqs[:size], 0) for size in sizes}
    if runner.chain_levels is not None:
        chains = measure_chains(runner, runner.chain_levels, reqs, sizes, _CONTEXT - 1)
        return _table(plain | chains.plain, {1: plain[1]} | chains.verify, chains.draft)
    verify = {1: plain[1]} | {size * (max_drafts + 1): steps.seconds(reqs[:size], max_drafts) for size in sizes}
    draft = dict.fromkeys((1, 2), 0.0)
    if steps.on_device:
        draft = {size: max(0.0, steps.seconds(reqs[:size], 0, drafts_after=True) - plain[size]) for size in sizes}
        rows = sizes[-1] * (max_drafts + 1)
        draft[rows] = max(draft[sizes[-1]], steps.seconds(reqs, max_drafts, drafts_after=True) - verify[rows])
    return _table(plain, verify, draft)


def _table(plain: dict[int, float], verify: dict[int, float], draft: dict[int, float]) -> CostTable:
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

    def seconds(self, reqs: Sequence[Req], num_drafts: int, *, drafts_after: bool = False,
                context: int = _CONTEXT) -> float:
        """The least time of a step that verifies ``num_drafts`` drafts of each request, after ``context`` tokens;
        ``drafts_after``: and drafts one more."""
        for req in reqs:
            assert req.page_table is not None
            req.page_table.draft_gap = None if drafts_after else 0  # the drafter skips a step of gaps alone
        times = [self._run([self._step(reqs, num_drafts, drafts_after, context)]) for _ in range(_TIMES)]
        if not num_drafts and not drafts_after:  # the host works on a plain step while the device runs the one before
            times.append(self._run([self._step(reqs, 0, False, context) for _ in range(_TIMES)]) / _TIMES)
        return min(times)

    def _step(self, reqs: Sequence[Req], num_drafts: int, drafts_after: bool, context: int) -> StepInput:
        drafts = {row: Drafts((0,) * num_drafts) for row in range(len(reqs))} if num_drafts else {}
        plan = DraftPlan(drafts, np.full(len(reqs), num_drafts), [int(drafts_after)] * len(reqs))
        chunks = [Chunk(req, context - 1, context, True) for req in reqs]
        return chunk_step(chunks, 0, self._page_size, None, plan)

    def _run(self, steps: Sequence[StepInput]) -> float:
        begin = time.perf_counter()
        launched = [self._executor.launch(step) for step in steps]
        for step in launched:
            step.wait()
        return time.perf_counter() - begin


def _requests(cache: KVCacheManager, count: int, num_tokens: int) -> list[Req]:
    """Makes requests with pages for ``num_tokens``, all of the first token."""
    reqs = []
    for number in range(count):
        message = Generate(f"cost-{number}", [0] * num_tokens, SamplingParams(temperature=0.0, max_new_tokens=1))
        req = Req.from_message(message, eos_ids=frozenset(), now=0.0, timeout=1.0)
        req.page_table = cache.new_private_table()
        if not cache.allocate_next(req.page_table, num_tokens):
            raise AssertionError("an idle cache has these pages")
        reqs.append(req)
    return reqs


def _release(cache: KVCacheManager, reqs: Sequence[Req]) -> None:
    for req in reqs:
        assert req.page_table is not None
        cache.release(req.page_table)
