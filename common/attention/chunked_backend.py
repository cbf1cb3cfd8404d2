"""Attention within chunks: a token sees those of its own chunk; chunks begin at multiples of their tokens (Llama 4).

Rows of one request in several chunks become requests of their own, whose page tables begin with their chunk's first
page. Any backend computes these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..api.errors import ConfigError
from ..forward.forward_batch import ForwardBatch, indptr_of, to_device
from ..forward.step_context import AttentionPlan
from .base import AttentionBackend
from .workspace import AttentionWorkspace


class ChunkedBackend:
    """``backend``, which knows no windows, within chunks of ``chunk`` tokens. ``on_device``: it plans decode steps on
    the device, where a CUDA graph may capture what makes their page tables."""

    def __init__(self, backend: AttentionBackend, chunk: int, page_size: int, *, on_device: bool):
        if chunk % page_size:
            raise ConfigError(f"--page-size {page_size} must divide the {chunk} tokens of a chunk within which layers "
                              "of the model attend.")
        self._backend = backend
        self._chunk, self._page_size = chunk, page_size
        self._on_device = on_device

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> AttentionPlan:
        if not (self._on_device and batch.is_decode):
            return self._backend.plan(self.cut(batch), workspace, max_length=max_length, out=out)
        longest = self._chunk if max_length is None else min(max_length, self._chunk)
        return _DecodePlan(lambda: self._backend.plan(self.trimmed(batch), workspace, max_length=longest, out=out),
                           self._backend.attends_last_tokens)

    def verifies(self, batch: ForwardBatch) -> bool:
        """Returns False: rows of one request may be in several chunks, so that they are computed as a prompt's."""
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        self._backend.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return self._backend.attends_last_tokens

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int,
                        *inputs: Any) -> torch.Tensor:
        return self._backend.run_last_tokens(self.cut(batch), workspace, layer, *inputs)

    def cut(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns the same rows with a request for each chunk, by the host copies. No request may be longer than its
        page table says: a prompt's and its cached prefix's pages are all there."""
        size, chunk = self._page_size, self._chunk
        counts, pages, lasts, parts = [], [], [], []
        begins = batch.kv_indptr_cpu.tolist()
        for begin, end, count, last in zip(begins, begins[1:], np.diff(batch.qo_indptr_cpu).tolist(),
                                           batch.kv_last_page_len_cpu.tolist()):
            stop = (end - begin - 1) * size + last
            start = stop - count
            for number in range(start // chunk, max(start, stop - 1) // chunk + 1):
                upto = min(stop, (number + 1) * chunk)
                counts.append(upto - max(start, number * chunk))
                first, after = number * chunk // size, -(-upto // size)
                pages.append(after - first)
                lasts.append(upto - (after - 1) * size)
                parts.append(batch.kv_indices_cpu[begin + first:begin + after])
        arrays = {"qo_indptr": indptr_of(np.array(counts)), "kv_indptr": indptr_of(np.array(pages)),
                  "kv_indices": np.concatenate(parts), "kv_last_page_len": np.array(lasts, np.int32)}
        tables: dict[str, Any] = {f"{name}_cpu": array for name, array in arrays.items()}
        tables |= to_device(arrays, batch.positions.device)
        made = replace(batch, max_q_len=max(counts), verifies=False, further=(), **tables)
        if batch.last_tokens is not None:
            made.last_tokens = self.cut(batch.last_tokens) if batch.last_tokens.num_reqs else batch.last_tokens
        return made

    def trimmed(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns a decode batch whose page tables begin with the chunk of each request's row, by operations on the
        device. Its host copies are those of ``batch``."""
        pages = batch.kv_indptr.diff()
        before = (pages - 1) * self._page_size + batch.kv_last_page_len - 1  # tokens
        left = pages - before // self._chunk * (self._chunk // self._page_size)
        kv_indptr = torch.cat((left.new_zeros(1), left.cumsum(0, dtype=torch.int32)))
        number = torch.arange(len(left) * (self._chunk // self._page_size), device=left.device)
        owner = torch.searchsorted(kv_indptr[1:].long(), number, right=True).clamp(max=len(left) - 1)
        places = (batch.kv_indptr[1:].long() - kv_indptr[1:].long())[owner] + number
        kv_indices = batch.kv_indices[places.clamp(max=len(batch.kv_indices) - 1)]
        return replace(batch, kv_indptr=kv_indptr, kv_indices=kv_indices, further=())


class _DecodePlan:
    """A plan that the first layer makes, so that a graph that captures the layers makes it in every replay."""

    def __init__(self, make: Callable[[], AttentionPlan], attends_last_tokens: bool):
        self._make = make
        self._plan: AttentionPlan | None = None
        self.attends_last_tokens = attends_last_tokens

    def run(self, layer: int, *inputs: Any) -> torch.Tensor:
        if self._plan is None:
            self._plan = self._make()
        return self._plan.run(layer, *inputs)

    def run_last_tokens(self, layer: int, *inputs: Any) -> torch.Tensor:
        raise AssertionError("each row of a decode step is the last of its request")

    def refresh(self, batch: ForwardBatch) -> None:
        """Does nothing: page tables are made on the device."""
