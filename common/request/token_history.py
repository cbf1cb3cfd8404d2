"""Token counts of a request, for its penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..forward.host_copies import upload_joined

if TYPE_CHECKING:
    from .token_buffer import TokenBuffer


class TokenHistory:
    """Distinct tokens of one request's output with their counts, updated as the output grows; and those of its prompt.

    Sparse: memory and time are proportional to the tokens present, not to the vocabulary. Tokens are counted on demand
    (``advance``), so that no code that appends tokens has to update the counts: this engine, a prefill server's result,
    or an answer that another server began.
    """

    def __init__(self, tokens: TokenBuffer, num_prompt_tokens: int, *, first: int = 0):
        """``num_prompt_tokens`` of ``tokens`` are the prompt; all after them, now and later, are output. Before
        ``first``, the prompt has embeddings and no tokens."""
        self._tokens = tokens
        self._first = first
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = num_prompt_tokens
        self._index_of: dict[int, int] = {}
        self._ids = np.empty(64, np.int32)
        self._counts = np.empty(64, np.int32)
        self._prompt_ids: torch.Tensor | None = None

    @property
    def ids(self) -> np.ndarray:
        """Distinct tokens of the counted output, int32, in order of their first appearance."""
        return self._ids[:len(self._index_of)]

    @property
    def counts(self) -> np.ndarray:
        """Counts of ``ids``, int32."""
        return self._counts[:len(self._index_of)]

    def advance(self) -> None:
        """Count the tokens appended since the last call."""
        new = self._tokens.view(self._num_counted)
        self._num_counted += len(new)
        for token in new.tolist():
            index = self._index_of.get(token)
            if index is None:
                self._append(token)
            else:
                self._counts[index] += 1

    def after(self, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``ids`` and ``counts`` as they would be with the tokens ``path`` at the end of the output."""
        if not path:
            return self.ids, self.counts
        counts = self.counts.copy()
        new: Counter[int] = Counter()
        for token in path:
            index = self._index_of.get(token)
            if index is None:
                new[token] += 1
            else:
                counts[index] += 1
        return (np.concatenate((self.ids, np.fromiter(new, np.int32, len(new)))),
                np.concatenate((counts, np.fromiter(new.values(), np.int32, len(new)))))

    def _append(self, token: int) -> None:
        index = self._index_of[token] = len(self._index_of)
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[index] = token
        self._counts[index] = 1

    def prompt_ids(self, device: torch.device) -> torch.Tensor:
        """Distinct tokens of the prompt [n] int64, cached on the device: a prompt does not change."""
        if self._prompt_ids is None:
            distinct = np.unique(self._tokens.view(self._first, self._num_prompt_tokens))
            self._prompt_ids = upload_joined([distinct], torch.int64, device)
        return self._prompt_ids
