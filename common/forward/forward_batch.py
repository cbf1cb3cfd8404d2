"""The forward batch: a step's token rows, and the pages of their keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...kernels.arguments import RowMask
from .host_copies import upload_joined

AfterGroup = Callable[[int, "torch.cuda.Event | None"], None]
"""Called with a layer group whose keys and values have been enqueued, and the event after which the pool has them."""


@dataclass
class ForwardBatch:
    """One step's input for a model, on the device, with host copies for planning.

    Rows are grouped by request: request b owns the query rows ``qo_indptr[b]:qo_indptr[b+1]`` and, *after* this
    step's keys and values are stored, the pages ``kv_indices[kv_indptr[b]:kv_indptr[b+1]]``, the last of which has
    ``kv_last_page_len[b]`` tokens (FlashInfer's format). The rows are the last slots of their requests. A row sees the
    slots up to its own; where drafts are trees, those that ``mask`` says.

    T rows, B requests, N pages in use, R rows that need logits.
    """

    max_q_len: int  # the most rows of a request
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    page_of_token: torch.Tensor  # [T] int64: page that receives this row's key and value
    offset_in_page: torch.Tensor  # [T] int64
    qo_indptr: torch.Tensor  # [B + 1] int32
    kv_indptr: torch.Tensor  # [B + 1] int32
    kv_indices: torch.Tensor  # [N] int32
    kv_last_page_len: torch.Tensor  # [B] int32
    logits_rows: torch.Tensor | None  # [R] int64; None: every row
    # host copies (int32, same contents)
    qo_indptr_cpu: np.ndarray
    kv_indptr_cpu: np.ndarray
    kv_indices_cpu: np.ndarray
    kv_last_page_len_cpu: np.ndarray
    embeds: torch.Tensor | None = None  # [E, hidden] float32: embeddings of rows that have no token
    embeds_rows: torch.Tensor | None = None  # [E] int64: these rows
    verifies: bool = False  # the rows are the newest tokens and the drafts of running requests
    mask: RowMask | None = None
    further: tuple[ForwardBatch, ...] = ()  # the same rows with the page tables of further cache groups
    drafts: DraftPages | None = None  # of a cache group where drafts have pages of their own
    # ``logits_rows`` as a decode batch of their own, where they are the last tokens of requests
    last_tokens: ForwardBatch | None = field(default=None, init=False)

    @classmethod
    def from_columns(cls, columns: BatchColumns, token_ids: TokenIds | torch.Tensor, device: torch.device,
                     logits_rows: np.ndarray | None = None,
                     embeds: Sequence[tuple[int, np.ndarray]] = ()) -> ForwardBatch:
        """Builds a batch on ``device``. On a GPU one copy from pinned memory transfers all arrays, without waiting for
        the device.

        ``logits_rows`` [R] int64 index the T token rows; None selects the last row of each request, an empty array
        none. ``embeds``: the first row of each run of rows with embeddings, and these [n, hidden] float32.
        """
        if logits_rows is None:
            logits_rows = columns.qo_indptr[1:] - np.int64(1)
        host = {"positions": columns.positions, "page_of_token": columns.page_of_token,
                "offset_in_page": columns.offset_in_page, "logits_rows": logits_rows,
                "qo_indptr": columns.qo_indptr, "kv_indptr": columns.kv_indptr, "kv_indices": columns.kv_indices,
                "kv_last_page_len": columns.kv_last_page_len}
        if columns.mask is not None:
            host |= {"words": columns.mask.words, "counts": columns.mask.counts}
        if isinstance(token_ids, TokenIds):
            host |= {"input_ids": token_ids.known, "pending": token_ids.rows, "sources": token_ids.sources}
        for index, group in enumerate(columns.further):
            host |= {f"{name}/{index}": getattr(group, name) for name in PAGE_FIELDS}
        tensors: dict[str, Any] = to_device(host, device)
        if columns.mask is not None:
            tensors["mask"] = RowMask(tensors.pop("words"), tensors.pop("counts"))
        groups = [{name: tensors.pop(f"{name}/{index}") for name in PAGE_FIELDS}
                  for index in range(len(columns.further))]
        if isinstance(token_ids, TokenIds):
            token_ids.fill(tensors["input_ids"], tensors.pop("pending"), tensors.pop("sources"))
        else:
            tensors["input_ids"] = token_ids
        batch = cls(max_q_len=columns.max_q_len, verifies=columns.verifies, **tensors, qo_indptr_cpu=columns.qo_indptr,
                    kv_indptr_cpu=columns.kv_indptr, kv_indices_cpu=columns.kv_indices,
                    kv_last_page_len_cpu=columns.kv_last_page_len)
        if not batch.is_decode and batch.mask is None:
            batch.last_tokens = _last_tokens(batch, logits_rows)
        batch.further = tuple(batch._in_pages(pages, group, logits_rows)
                              for pages, group in zip(groups, columns.further))
        batch.embeds, batch.embeds_rows = _upload_embeds(embeds, device)
        return batch

    def _in_pages(self, tensors: dict[str, Any], pages: GroupPages, logits_rows: np.ndarray) -> ForwardBatch:
        """Returns the same rows with the ``pages`` of another cache group, on the device ``tensors``."""
        batch = replace(self, **tensors, kv_indptr_cpu=pages.kv_indptr, kv_indices_cpu=pages.kv_indices)
        if pages.num_drafts is not None:
            batch.drafts = DraftPages(pages.num_drafts, pages.page_of_token)
        if self.last_tokens is not None:
            batch.last_tokens = _last_tokens(batch, logits_rows)
        return batch

    def in_group(self, cache_group: int) -> ForwardBatch:
        """Returns the batch with the page tables of a cache group."""
        return self.further[cache_group - 1] if cache_group else self

    @property
    def is_decode(self) -> bool:
        """True where each request has one row, which sees all tokens."""
        return self.max_q_len == 1 and self.mask is None

    @property
    def num_reqs(self) -> int:
        return len(self.kv_last_page_len_cpu)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


class DraftPages(NamedTuple):
    """The last ``counts`` [B] rows of each request are drafts, whose pages are in ``page_of_token`` [T] and not in
    ``kv_indices``; both in host memory."""

    counts: np.ndarray
    page_of_token: np.ndarray


PAGE_FIELDS = ("page_of_token", "kv_indptr", "kv_indices")
"""The fields of a batch that differ between cache groups."""


class GroupPages(Protocol):
    """The page tables of a step in a further cache group; see ForwardBatch."""

    @property
    def page_of_token(self) -> np.ndarray: ...

    @property
    def kv_indptr(self) -> np.ndarray: ...

    @property
    def kv_indices(self) -> np.ndarray: ...

    @property
    def num_drafts(self) -> np.ndarray | None: ...


class MaskColumns(NamedTuple):
    """A RowMask in host memory: ``words`` [T] int64 and ``counts`` [B] int32."""

    words: np.ndarray
    counts: np.ndarray


class BatchColumns(NamedTuple):
    """A step's rows without their tokens, in host memory: T rows of B requests; see ForwardBatch."""

    positions: np.ndarray  # [T] int64
    page_of_token: np.ndarray  # [T] int64
    offset_in_page: np.ndarray  # [T] int64
    kv_indptr: np.ndarray  # [B + 1] int32
    kv_indices: np.ndarray  # [N] int32
    kv_last_page_len: np.ndarray  # [B] int32
    pages_version: int | None  # equal versions have equal ``kv_indptr`` and ``kv_indices``; None: unknown
    qo_indptr: np.ndarray  # [B + 1] int32
    max_q_len: int
    further: Sequence[GroupPages] = ()  # of further cache groups
    verifies: bool = False
    mask: MaskColumns | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.kv_last_page_len)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    def in_group(self, cache_group: int) -> BatchColumns:
        """Returns the rows with the page tables of a cache group."""
        if not cache_group:
            return self
        pages = self.further[cache_group - 1]
        return self._replace(page_of_token=pages.page_of_token, kv_indptr=pages.kv_indptr, kv_indices=pages.kv_indices)


def _no_columns() -> BatchColumns:
    int64, int32, start = np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(1, np.int32)
    return BatchColumns(int64, int64, int64, start, int32, int32, 0, start, 1)


NO_COLUMNS = _no_columns()
"""A decode step of padding only."""


@dataclass(frozen=True)
class TokenIds:
    """The tokens of a step's T rows: ``known`` [T] int64, but those of ``rows`` [P] int64 are ``previous[sources]``:
    the step before has sampled them, and only the device has their values."""

    known: np.ndarray
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    previous: torch.Tensor | None = None

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Returns the tokens [T] int64, without waiting for the device."""
        if not len(self.rows):
            return upload_joined([self.known], torch.int64, device)
        host = {"known": self.known, "rows": self.rows, "sources": self.sources}
        known, rows, sources = to_device(host, device).values()
        return self.fill(known, rows, sources)

    def fill(self, known: torch.Tensor, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Writes the tokens that only the device has to ``known``, by these arrays' copies there; returns it."""
        if len(self.rows):
            assert self.previous is not None, "a row's token comes from a step that was not passed"
            known[rows] = self.previous[sources]
        return known


class ModelInput(NamedTuple):
    """A step's input for the model runner. ``token_ids`` [T] int64 may be on the device already; ``follows_argmax``:
    they are the argmax that the runner returned of the step before, row by row. ``drafts``: a drafter reads the batch
    that is computed, and of all rows the hidden states that enter layers ``features``, those after the final norm where
    it is empty.

    ``logits_rows`` [R] int64 and ``embeds`` are those of ``ForwardBatch.from_columns``. The last ``num_hidden`` of the
    logits rows get hidden states instead. ``num_prefill`` requests compute prompts.
    """

    columns: BatchColumns
    token_ids: TokenIds | torch.Tensor
    logits_rows: np.ndarray | None = None
    num_hidden: int = 0
    embeds: Sequence[tuple[int, np.ndarray]] = ()
    follows_argmax: bool = False
    drafts: bool = False
    features: Sequence[int] | None = None
    num_prefill: int = 0

    @property
    def num_logits(self) -> int:
        rows = self.columns.num_reqs if self.logits_rows is None else len(self.logits_rows)
        return rows - self.num_hidden

    @property
    def is_plain_decode(self) -> bool:
        """True for one token and logits a request, which is what decode graphs compute."""
        return self.columns.max_q_len == 1 and self.logits_rows is None and not self.embeds and not self.drafts


@dataclass(frozen=True)
class Row:
    """One request's part of a forward pass, apart from any engine: for warm-up, measurements and tests.

    ``token_ids`` are computed now; ``start`` tokens before them are in the KV cache already; ``page_ids`` covers all of
    these tokens and may be longer. With ``pending_index`` one more token is computed after ``token_ids``: the one at
    this index of the tokens that the previous step sampled, whose value only the device knows.
    """

    token_ids: Sequence[int] | np.ndarray
    start: int
    page_ids: np.ndarray
    pending_index: int | None = None
    embeds: np.ndarray | None = None  # [n, hidden] float32, instead of the first n of ``token_ids``
    further: Sequence[np.ndarray] = ()  # as ``page_ids``, in further cache groups

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + (self.pending_index is not None)


def model_input(rows: Sequence[Row], page_size: int, logits_rows: Sequence[int] | None = None,
                previous: torch.Tensor | None = None) -> ModelInput:
    """Returns the input of a step of ``rows`` (at least one, each with at least one token).

    ``previous`` holds the tokens that the step before sampled (int64, on the device), for rows with a
    ``pending_index``.
    """
    lengths = np.array([row.num_tokens for row in rows])
    starts = np.array([row.start for row in rows])
    assert lengths.min() > 0
    pages = -((starts + lengths) // -page_size)
    qo_indptr, kv_indptr = indptr_of(lengths), indptr_of(pages)
    positions = ragged_positions(starts, lengths, qo_indptr)
    in_request, offsets = np.divmod(positions, page_size)

    def pages_of(tables: Iterable[np.ndarray]) -> _RowPages:
        kv_indices = np.concatenate([np.asarray(ids[:count], np.int32) for ids, count in zip(tables, pages)])
        assert len(kv_indices) == kv_indptr[-1], "a row's pages do not cover its tokens"
        return _RowPages(kv_indices[np.repeat(kv_indptr[:-1], lengths) + in_request].astype(np.int64), kv_indptr,
                         kv_indices)

    first = pages_of(row.page_ids for row in rows)
    columns = BatchColumns(
        positions, first.page_of_token, offsets, kv_indptr, first.kv_indices,
        (starts + lengths - (pages - 1) * page_size).astype(np.int32), None, qo_indptr, int(lengths.max()),
        tuple(map(pages_of, zip(*(row.further for row in rows)))))
    pending = [i for i, row in enumerate(rows) if row.pending_index is not None]
    token_ids = TokenIds(np.concatenate([_known_ids(row) for row in rows]), (qo_indptr[1:][pending] - 1).astype(
        np.int64), np.asarray([rows[i].pending_index for i in pending], np.int64), previous)
    return ModelInput(columns, token_ids, None if logits_rows is None else np.asarray(logits_rows, np.int64),
                      embeds=[(int(first), row.embeds) for first, row in zip(qo_indptr, rows)
                              if row.embeds is not None])


class _RowPages(NamedTuple):
    """The pages of rows in one cache group; see ForwardBatch."""

    page_of_token: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    num_drafts: np.ndarray | None = None


def build_forward_batch(rows: Sequence[Row], page_size: int, device: torch.device,
                        logits_rows: Sequence[int] | None = None,
                        previous: torch.Tensor | None = None) -> ForwardBatch:
    """Builds the batch of ``model_input``."""
    step = model_input(rows, page_size, logits_rows, previous)
    return ForwardBatch.from_columns(step.columns, step.token_ids, device, step.logits_rows, step.embeds)


def ragged_positions(starts: np.ndarray, lengths: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Returns the positions [T] int64 of ``lengths`` [B] rows a request from ``starts`` [B]; ``indptr``: their
    offsets."""
    positions: np.ndarray = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
    return positions.astype(np.int64)


def _last_tokens(batch: ForwardBatch, rows: np.ndarray) -> ForwardBatch | None:
    """Returns ``rows``, the batch's ``logits_rows``, as a decode batch: each attends to all tokens of its request. None
    where some are not the last of their requests, or where the rows are too many to save work."""
    requests = np.searchsorted(batch.qo_indptr_cpu, rows + 1)
    if 2 * len(rows) > batch.num_tokens or np.any(batch.qo_indptr_cpu[requests] != rows + 1) or np.any(
            np.diff(rows) <= 0):
        return None
    requests = requests - 1
    assert batch.logits_rows is not None
    return slice_batch(batch, batch.logits_rows, requests, np.arange(len(rows) + 1, dtype=np.int32),
                       np.diff(batch.kv_indptr_cpu)[requests], batch.kv_last_page_len_cpu[requests])


def slice_batch(batch: ForwardBatch, rows: slice | torch.Tensor, requests: np.ndarray, qo_indptr: np.ndarray,
                pages: np.ndarray, last_page_len: np.ndarray) -> ForwardBatch:
    """Returns ``rows`` of ``batch`` as a batch of their own, without logits. They belong to its ``requests`` [n], by
    ``qo_indptr`` [n + 1]; each request has its first ``pages`` [n] pages, with ``last_page_len`` [n] tokens in the
    last. ``qo_indptr`` and ``last_page_len`` are int32."""
    kv_indptr = indptr_of(pages)
    within = np.arange(kv_indptr[-1]) - np.repeat(kv_indptr[:-1], pages)
    table = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr,
             "kv_indices": batch.kv_indices_cpu[np.repeat(batch.kv_indptr_cpu[requests], pages) + within],
             "kv_last_page_len": last_page_len}
    per_row: dict[str, Any] = {name: getattr(batch, name)[rows] for name in ("input_ids", "positions", "page_of_token",
                                                             "offset_in_page")}
    tensors: dict[str, Any] = to_device(table, batch.positions.device)
    return ForwardBatch(
        max_q_len=int(np.diff(qo_indptr).max(initial=1)), logits_rows=None, **per_row,
        **tensors,
        qo_indptr_cpu=qo_indptr, kv_indptr_cpu=kv_indptr, kv_indices_cpu=table["kv_indices"],
        kv_last_page_len_cpu=last_page_len)


def rows_as_requests(batch: ForwardBatch, page_size: int) -> ForwardBatch:
    """Returns the rows of ``batch`` as requests of their own: each sees all slots up to its own, or those that the
    batch's ``mask`` says."""
    counts, mask = np.diff(batch.qo_indptr_cpu), batch.mask
    requests = np.repeat(np.arange(batch.num_reqs), counts)
    lengths = (np.diff(batch.kv_indptr_cpu) - 1) * page_size + batch.kv_last_page_len_cpu
    seen = lengths[requests]
    if mask is None:
        seen = seen - np.repeat(batch.qo_indptr_cpu[1:], counts) + np.arange(1, batch.num_tokens + 1)
    else:
        mask = RowMask(mask.words, mask.counts[torch.from_numpy(requests).to(mask.counts.device)])
    pages = -(seen // -page_size)
    return replace(slice_batch(batch, slice(None), requests, np.arange(batch.num_tokens + 1, dtype=np.int32), pages,
                               (seen - (pages - 1) * page_size).astype(np.int32)), mask=mask)


def _upload_embeds(embeds: Sequence[tuple[int, np.ndarray]],
                   device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the batch's ``embeds`` and ``embeds_rows``, where there are any."""
    if not embeds:
        return None, None
    rows = np.concatenate([np.arange(first, first + len(rows)) for first, rows in embeds])
    joined = torch.from_numpy(np.concatenate([rows for _, rows in embeds]))
    if device.type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=True), upload_joined([rows], torch.int64, device)


def _known_ids(row: Row) -> np.ndarray:
    """Returns the row's token ids, with 0 for the one that the device fills in."""
    ids = np.zeros(row.num_tokens, np.int64)
    ids[:len(row.token_ids)] = row.token_ids
    return ids


def indptr_of(counts: np.ndarray) -> np.ndarray:
    """Returns the offsets ``[n + 1]`` int32 of ``[n]`` counts: where each begins, and where the last ends."""
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def to_device(host: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies int32 and int64 arrays, in one transfer that does not wait for the device."""
    if device.type != "cuda":
        return {name: torch.from_numpy(array) for name, array in host.items()}
    # Triton compiles a kernel anew for pointers that are not 16-byte aligned, so every array starts aligned.
    ends = np.cumsum([-(array.nbytes // -16) * 16 for array in host.values()])
    packed = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    view = packed.numpy()
    begins = [0, *ends[:-1]]
    for begin, array in zip(begins, host.values()):
        view[begin:begin + array.nbytes] = array.view(np.uint8)
    copied = packed.to(device, non_blocking=True)
    return {name: copied[begin:begin + array.nbytes].view(torch.int64 if array.itemsize == 8 else torch.int32)
            for begin, (name, array) in zip(begins, host.items())}
