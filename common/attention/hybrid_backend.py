"""Attention and recurrent states of a hybrid model: layers with keys and values run on an attention backend, layers
with a state on the pages of the state group (kvcache/state_group.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...kernels.arguments import StateRuns
from ..forward.forward_batch import ForwardBatch
from ..forward.host_copies import upload_joined
from ..forward.step_context import AttentionPlan
from ..kvcache.cache_group import ABSENT
from ..kvcache.pool import KVPool
from .base import AttentionBackend
from .workspace import AttentionWorkspace

Mix = Callable[[torch.Tensor, StateRuns], None]
"""Computes rows of a layer from its states ``[num_pages, heads, values]`` and the runs, and writes the states after
them."""


class StateBackend:
    """Plans the states of the layers ``layers``, whose pages are those of the cache group ``cache_group`` in ``pool``.
    """

    def __init__(self, pool: KVPool, cache_group: int, layers: Sequence[int]):
        self._page_size = pool.layout.page_size
        self._cache_group = cache_group
        self._states = {layer: pool.states(index) for index, layer in enumerate(layers)}

    def plan(self, batch: ForwardBatch) -> StatePlan:
        batch = batch.in_group(self._cache_group)
        if batch.is_decode:
            return StatePlan(self._states, lambda: [self._decode_runs(batch)])
        runs = [_upload(runs, batch.input_ids.device) for runs in self._cut(batch)]
        return StatePlan(self._states, lambda: runs)

    def _decode_runs(self, batch: ForwardBatch) -> StateRuns:
        """One row a request, which a CUDA graph can capture: the first row of a page reads the page before."""
        last = batch.kv_indptr[1:].long() - 1
        targets = batch.kv_indices[last].long()
        before = batch.kv_indices[(last - 1).clamp(min=0)].long()
        is_first = batch.kv_last_page_len == 1
        alone = batch.kv_indptr[1:] - batch.kv_indptr[:-1] == 1  # the first token of a request
        before = torch.where(alone, ABSENT, before)
        sources = torch.where(is_first, before, targets)
        return StateRuns(batch.qo_indptr[:-1], batch.qo_indptr[1:], sources, targets, 1, None)

    def _cut(self, batch: ForwardBatch) -> list[list[tuple[int, int, int, int]]]:
        """Cuts each request's rows where a state is kept: at the end of the page that they begin in, and of the last
        full page; with drafts after each row. Returns the first runs of all requests, then the second, and so on, as
        begin, end, source and target."""
        counts = [0] * batch.num_reqs if batch.drafts is None else batch.drafts.counts.tolist()
        cuts: list[list[tuple[int, int, int, int]]] = [[] for _ in range(max(3, max(counts, default=0) + 1))]
        size, indices = self._page_size, batch.kv_indices_cpu
        for b in range(batch.num_reqs):
            begin, end = batch.qo_indptr_cpu[b:b + 2].tolist()
            first, last = batch.kv_indptr_cpu[b:b + 2].tolist()
            if counts[b]:
                for row, run in zip(cuts, self._draft_runs(batch, b, counts[b])):
                    row.append(run)
                continue
            stop = (last - first - 1) * size + int(batch.kv_last_page_len_cpu[b])  # counted from the first page listed
            start = stop - (end - begin)
            ends = sorted({-(-start // size) * size, stop // size * size, stop} - {start})
            ends = [at for at in ends if start < at <= stop and (at == stop or indices[first + at // size - 1] >= 0)]
            source = ABSENT if start == 0 else int(indices[first + (start - 1) // size])
            for number, at in enumerate(ends):
                target = int(indices[first + (at - 1) // size])
                cuts[number].append((end - (stop - start), end - (stop - at), source, target))
                start, source = at, target
        return [runs for runs in cuts if runs]

    def _draft_runs(self, batch: ForwardBatch, b: int, count: int) -> list[tuple[int, int, int, int]]:
        """Returns a run for the newest token of request ``b`` and for each of its ``count`` drafts."""
        assert batch.drafts is not None
        begin, end = batch.qo_indptr_cpu[b:b + 2].tolist()
        own = batch.kv_indices_cpu[batch.kv_indptr_cpu[b]:batch.kv_indptr_cpu[b + 1]].tolist()
        offset = (int(batch.kv_last_page_len_cpu[b]) - 1 - count) % self._page_size  # of the newest token in its page
        before = own[-1] if offset else own[-2]
        pages = [before, own[-1], *batch.drafts.page_of_token[begin + 1:end].tolist()]
        return [(row, row + 1, *pages[row - begin:row - begin + 2]) for row in range(begin, end)]


class StatePlan:
    """The runs of a batch, one after the other: those of an element of ``make_runs()`` begin where others of an element
    before have ended. The first layer makes them, so that a graph that captures the layers makes them in every replay.
    """

    def __init__(self, states: dict[int, torch.Tensor], make_runs: Callable[[], Sequence[StateRuns]]):
        self._states = states
        self._make_runs = make_runs
        self._runs: Sequence[StateRuns] | None = None

    def run(self, layer: int, mix: Mix) -> None:
        """Computes a layer's rows by ``mix``, and its states."""
        states = self._states[layer]
        if self._runs is None:
            self._runs = self._make_runs()
        for runs in self._runs:
            mix(states, runs)


class HybridBackend:
    """An attention backend for the layers ``attention_layers``, and the states of other layers, or of the same."""

    def __init__(self, attention: AttentionBackend, attention_layers: Sequence[int], states: StateBackend):
        self._attention = attention
        self._places = {layer: index for index, layer in enumerate(attention_layers)}
        self._states = states

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> HybridPlan:
        attention = self._attention.plan(batch, workspace, max_length=max_length)
        return HybridPlan(attention, self._places, self._states.plan(batch))

    def verifies(self, batch: ForwardBatch) -> bool:
        return self._attention.verifies(batch)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        self._attention.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return self._attention.attends_last_tokens

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int,
                        *inputs: object) -> torch.Tensor:
        return self._attention.run_last_tokens(batch, workspace, self._places[layer], *inputs)


class HybridPlan:
    """The plans of a batch's attention and of its states."""

    def __init__(self, attention: AttentionPlan, places: dict[int, int], states: StatePlan):
        self._attention = attention
        self._places = places
        self.states = states
        self.attends_last_tokens = attention.attends_last_tokens

    def run(self, layer: int, *inputs: object) -> torch.Tensor:
        return self._attention.run(self._places[layer], *inputs)

    def run_last_tokens(self, layer: int, *inputs: object) -> torch.Tensor:
        return self._attention.run_last_tokens(self._places[layer], *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        self._attention.refresh(batch)


def states_of(plan: AttentionPlan) -> StatePlan:
    """The states of a hybrid model's plan."""
    assert isinstance(plan, HybridPlan), "a model without a StateSpec has a recurrent layer"
    return plan.states


def _upload(runs: list[tuple[int, int, int, int]], device: torch.device) -> StateRuns:
    columns = np.array(runs, np.int64)
    begins, ends, sources, targets = upload_joined([*columns.T], torch.int64, device).view(4, -1)
    return StateRuns(begins.int(), ends.int(), sources, targets, int((columns[:, 1] - columns[:, 0]).max()),
                     columns[:, :2])
