"""Step input: the rows of one step as columns, whatever their kind: prefill chunks, decode rows, rows with drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ..api.drafts import Drafts
from ..forward.chain_rows import ChainRows
from ..forward.forward_batch import BatchColumns, indptr_of, ragged_positions
from ..kvcache.manager import PageTable
from ..kvcache.page_columns import PageColumns
from .req import Req
from .sampling_metadata import SamplingMetadata

if TYPE_CHECKING:
    from .input_batch import InputBatch

_NO_ROWS = np.empty(0, np.int64)
_numbers = count(1)


class Chunk(NamedTuple):
    """The request's tokens ``start:stop``, which the step computes, without drafts; ``samples``: they include the last
    token, so that the step samples the next one."""

    req: Req
    start: int
    stop: int
    samples: bool


class StepTokens(NamedTuple):
    """Token ids [T] int64 that a step computes: ``known``, but for ``rows`` [P], whose tokens the step numbered
    ``follows`` has sampled at ``sources`` [P] of its samples; only the device has them. ``known`` is None where that
    step has sampled all, row by row."""

    known: np.ndarray | None
    rows: np.ndarray = _NO_ROWS
    sources: np.ndarray = _NO_ROWS
    follows: int = 0


class DraftPlan(NamedTuple):
    """The drafts of a step of B requests, and the room for those after it.

    ``drafts``: those that it verifies, by request; ``counts`` [B] int64: how many these are. ``limits``: the most that
    a drafter on the device may draft afterwards for each request that samples; empty without one.
    """

    drafts: Mapping[int, Drafts]
    counts: np.ndarray
    limits: Sequence[int] = ()


class StepInput(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One step of B requests, T tokens and S samples.

    Request b computes ``q_lens[b]`` tokens from position ``starts[b]``. The logits of its last ``num_samples[b]`` of
    them are sampled: none in the middle of a prompt, one, or all where it has ``drafts``, which follow its last token.
    The first ``num_prefill`` requests are in prefill. ``extra_index``: requests with row extras, ascending;
    ``sampling`` [S] has the samples' metadata without these, and with positions where these matter to plain sampling;
    ``all_greedy``: all plain rows take the argmax. ``draft_limits``: see DraftPlan.

    With ``chains`` it is a chain step: captured graphs verify these rows, accept, and draft as many tokens for each
    request. Without ``extra_index``, ``columns``, ``tokens`` and ``drafts`` are empty, ``starts`` lower bounds, and
    ``sampling`` [B] has an entry of each request, whose position means nothing. With ``extra_index`` the host knows all
    rows, and the other fields are of the S that are not void, as without ``chains``.

    ``number`` is unique. ``input_batch``: the persistent batch whose rows a decode step computes, ``rows_version`` its
    version, and ``last_step_rows`` those whose last step this is.
    """

    reqs: Sequence[Req]
    columns: BatchColumns
    starts: np.ndarray  # [B] int64
    q_lens: np.ndarray  # [B] int64
    num_samples: np.ndarray  # [B] int64
    tokens: StepTokens
    sample_index: list[int]  # the requests that sample, ascending
    sampling: Sequence[SamplingMetadata]
    extra_index: Sequence[int] = ()
    all_greedy: bool = False
    num_prefill: int = 0
    drafts: Mapping[int, Drafts] = {}
    draft_limits: Sequence[int] = ()
    chains: ChainRows | None = None
    input_batch: InputBatch | None = None
    rows_version: int = 0
    last_step_rows: Sequence[int] = ()
    number: int = msgspec.field(default_factory=_numbers.__next__)

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def sample_owners(self) -> list[int]:
        """The request [S] of each sample, by its index."""
        if not self.drafts:
            return self.sample_index
        owners: list[int] = np.repeat(np.arange(len(self.reqs)), self.num_samples).tolist()
        return owners

    def __repr__(self) -> str:
        return f"StepInput({self.number}: {self.num_prefill} prompts, {self.num_decode_rows} decode rows)"

    @property
    def num_tokens(self) -> int:
        return self.columns.num_tokens

    @property
    def known_tokens(self) -> np.ndarray:
        """The token ids [T] int64 of a step whose tokens the host knows."""
        assert self.tokens.known is not None and not len(self.tokens.rows)
        return self.tokens.known

    @property
    def num_decode_rows(self) -> int:
        return len(self.reqs) - self.num_prefill

    @cached_property
    def sampled_reqs(self) -> Sequence[Req]:
        """The requests that sample."""
        if len(self.sample_index) == len(self.reqs):
            return self.reqs
        return [self.reqs[index] for index in self.sample_index]

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All rows but drafts, request by request."""
        return [Chunk(req, start, start + q_len - max(0, samples - 1), bool(samples)) for req, start, q_len, samples
                in zip(self.reqs, self.starts.tolist(), self.q_lens.tolist(), self.num_samples.tolist())]

    @property
    def prefill_chunks(self) -> list[Chunk]:
        """The chunks of requests in prefill."""
        return self.chunks[:self.num_prefill]

    @cached_property
    def sample_of(self) -> dict[Req, int]:
        """The index of each sampling request's only sample."""
        return {req: index for index, req in enumerate(self.sampled_reqs)}

    @property
    def sample_rows(self) -> np.ndarray | None:
        """The token rows [S] int64 that are sampled; None where they are the last of all requests."""
        if len(self.sample_index) == len(self.reqs) and not self.drafts:
            return None
        ends, counts = self.columns.qo_indptr[1:], self.num_samples
        return ragged_positions(ends - counts, counts, indptr_of(counts))


def chunk_step(chunks: Sequence[Chunk], num_prefill: int, page_size: int, last: StepInput | None,
               plan: DraftPlan | None = None) -> StepInput:
    """Builds a step of ``chunks`` (at least one), the first ``num_prefill`` of which are prompts. ``last``: the step
    launched last, which has sampled pending tokens. The drafts of ``plan`` have pages."""
    reqs = [chunk.req for chunk in chunks]
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    num_samples = np.array([chunk.samples for chunk in chunks], np.int64)
    stops = np.array([chunk.stop for chunk in chunks], np.int64)
    drafts: Mapping[int, Drafts] = {}
    if plan is not None and plan.drafts:
        drafts = plan.drafts
        num_samples, stops = num_samples + plan.counts, stops + plan.counts
    q_lens = stops - starts
    qo_indptr = indptr_of(q_lens)
    positions = ragged_positions(starts, q_lens, qo_indptr)
    pages = PageColumns([req.page_table for req in reqs if req.page_table is not None], page_size)
    slots = pages.ragged_slots(stops - 1, q_lens, positions)
    sample_index = [index for index, chunk in enumerate(chunks) if chunk.samples]
    extra_index = [index for index, req in enumerate(reqs) if req.extras]
    return StepInput(
        reqs, BatchColumns(positions, *slots[:-1], qo_indptr, int(q_lens.max()), slots.further), starts, q_lens,
        num_samples, _chunk_tokens(chunks, qo_indptr, last, drafts), sample_index,
        [SamplingMetadata(chunks[index].req.sampling, position) for index in sample_index
         for position in range(chunks[index].stop, int(stops[index]) + 1)], extra_index,
        all(reqs[index].sampling.greedy or reqs[index].extras for index in sample_index), num_prefill, drafts,
        () if plan is None else plan.limits)


def draft_step(chunk: Chunk, page_size: int, limits: Sequence[int]) -> StepInput:
    """Builds a step that a draft model computes alone: the tokens of one chunk, whose pages of the first cache group
    have the model's keys and values already. ``limits`` as in DraftPlan."""
    req, start, stop, samples = chunk
    assert req.page_table is not None
    positions = np.arange(start, stop, dtype=np.int64)
    one = np.ones(1, np.int64)
    pages = PageColumns([PageTable(req.page_table.ids, None)], page_size)
    slots = pages.ragged_slots(one * (stop - 1), one * (stop - start), positions)
    qo_indptr = indptr_of(one * (stop - start))
    return StepInput(
        [req], BatchColumns(positions, *slots[:-1], qo_indptr, stop - start), one * start, one * (stop - start),
        one * samples, StepTokens(req.tokens.view(start, stop).astype(np.int64)), [0] if samples else [],
        [SamplingMetadata(req.sampling, stop)] if samples else [], num_prefill=1, draft_limits=limits)


def _chunk_tokens(chunks: Sequence[Chunk], qo_indptr: np.ndarray, last: StepInput | None,
                  drafts: Mapping[int, Drafts]) -> StepTokens:
    known = np.zeros(int(qo_indptr[-1]), np.int64)
    rows, sources = [], []
    for index, ((req, start, stop, _), first) in enumerate(zip(chunks, qo_indptr.tolist())):
        ids, end = req.tokens.view(start, stop), first + stop - start
        known[first:first + len(ids)] = ids
        if index in drafts:
            known[end:end + len(drafts[index])] = drafts[index].tokens
        if stop > req.tokens.count:
            assert last is not None, "a pending token comes from a step"
            rows.append(end - 1)
            sources.append(last.sample_of[req])
    if not rows:
        return StepTokens(known)
    assert last is not None
    return StepTokens(known, np.array(rows, np.int64), np.array(sources, np.int64), last.number)
