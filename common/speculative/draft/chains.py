"""Chains of drafts: what the drafters of all draft models do alike after they have read a step."""

from __future__ import annotations

import numpy as np
import torch

from ...api.drafts import Drafts
from ...kvcache.manager import PageTable
from ..base import DraftStep


class StepRows:
    """The rows of a step as arrays, of the n requests in ``sample_index``.

    ``requests`` [n]: their indices in the step; ``last_rows`` [n]: the last row of each that is right, ``positions``
    [n] its position: its next token is the request's newest; ``limits`` [n].
    """

    def __init__(self, step: DraftStep):
        self._step = step
        columns = step.step.columns
        self.requests = np.asarray(step.step.sample_index, np.int64)
        counts = np.asarray(step.counts, np.int64)
        ends = columns.qo_indptr[1:][self.requests].astype(np.int64)
        self.last_rows: np.ndarray = ends - step.step.num_samples[self.requests] + counts - 1
        self.positions: np.ndarray = columns.positions[self.last_rows]
        self.limits = np.asarray(step.limits, np.int64)

    def page_tables(self, chosen: np.ndarray) -> list[PageTable]:
        """Returns the page tables of the requests at ``chosen`` [m]."""
        reqs = self._step.step.reqs
        tables = [reqs[index].page_table for index in self.requests[chosen].tolist()]
        return [table for table in tables if table is not None]


class Chains:
    """The drafts of a step, as far as they are sampled: token j of a request in column j."""

    def __init__(self, step: DraftStep, rows: StepRows, token_ids: torch.Tensor | None):
        """``token_ids`` [V] int64: those of the head's columns, where they are not all tokens."""
        self._step = step
        self._rows = rows
        self._token_ids = token_ids
        self._columns: list[tuple[np.ndarray, torch.Tensor]] = []

    def sample(self, logits: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
        """Samples the next draft of the requests at ``chosen`` [m] (of the rows) of ``logits`` [m, V]; returns the
        tokens [m] int64."""
        # The newest token is one position after the row, the first draft one further.
        positions = self._rows.positions[chosen] + 2 + len(self._columns)
        tokens, _ = self._step.sampler.sample(logits, self._rows.requests[chosen].tolist(), positions.tolist(),
                                              token_ids=self._token_ids)
        self._columns.append((chosen, tokens[:, 0]))
        return tokens[:, 0]

    @property
    def newest(self) -> torch.Tensor:
        """The tokens that were sampled last."""
        return self._columns[-1][1]

    def drafts(self) -> list[Drafts | None]:
        """Returns the drafts of each request, at most as many as its limit; waits for the device."""
        chains: list[list[int]] = [[] for _ in self._rows.requests]
        if self._columns:
            tokens = torch.cat([tokens for _, tokens in self._columns])  # one copy from the device
            for index, token in zip(np.concatenate([chosen for chosen, _ in self._columns]).tolist(), tokens.tolist()):
                chains[index].append(token)
        return [Drafts(tuple(chain[:limit])) if chain and limit else None
                for chain, limit in zip(chains, self._rows.limits.tolist())]
