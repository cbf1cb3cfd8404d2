"""Drafters that read the model's hidden states: EAGLE, EAGLE-3 and layers of multi-token prediction.

Row i of their networks has the model's hidden state of position i and the token after it, so that their keys and values
of position i depend on the token at i + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ....kernels.rowwise.gather_rows import gather_rows
from ...api.drafts import Drafts
from ...attention.base import AttentionPlanner
from ...attention.workspace import AttentionWorkspace
from ...config.model import ModelSpec
from ...forward.forward_batch import ForwardBatch
from ...forward.host_copies import upload_joined
from ...forward.step_context import StepContext
from ...kvcache.layout import KVLayout
from ...kvcache.pool import KVPool
from ...models.drafts.network import DraftHead, DraftNetwork
from ...weights.slots import Slot
from ..base import ChainStep, DraftContext, Drafter, DraftStep, Features
from .chains import Chains, StepRows
from .checkpoint import draft_attention
from .pages import DraftPages
from .trees import TreeShape, grow_trees, tree_shape


@dataclass(frozen=True)
class ShiftedDraftModel:
    """A loaded network of ``spec``, with its ``head``."""

    context: DraftContext
    spec: ModelSpec
    network: DraftNetwork
    head: DraftHead
    features: Features
    layout: KVLayout

    shifted = True

    def make_drafter(self, pool: KVPool, workspace: AttentionWorkspace) -> Drafter:
        return ShiftedDrafter(self.network, self.head, draft_attention(self.context, self.spec, pool), workspace,
                              pool.layout.page_size, tree_shape(self.context.config.speculative))

    def slots(self) -> Iterator[Slot]:
        yield from self.network.slots()


class ShiftedDrafter:
    """Drafts chains or trees by a network over its pool."""

    def __init__(self, network: DraftNetwork, head: DraftHead, attention: AttentionPlanner,
                 workspace: AttentionWorkspace, page_size: int, shape: TreeShape):
        """``shape``: of a chain, where one candidate is expanded at a time. Networks with a depth draft chains."""
        self._network = network
        self._head = head
        self._attention = attention
        self._workspace = workspace
        self._page_size = page_size
        self._shape = shape

    @torch.inference_mode()
    def run(self, step: DraftStep) -> list[Drafts | None]:
        rows = StepRows(step)
        if self._shape.topk > 1:
            return self._grow(step, rows)
        rows.limits = np.minimum(rows.limits, self._shape.num_steps)
        chains = Chains(step, rows, self._head.token_ids)
        # Layers after the first read drafts where tokens are not known yet, of all requests.
        chosen = np.flatnonzero(rows.limits > 0) if self._network.depth == 1 else np.arange(len(rows.requests))
        states = self._extend(step, rows, chains, chosen)
        if states is not None and rows.limits.max() > self._network.depth:
            self._continue(step, rows, chains, chosen, states)
        return chains.drafts()

    def _grow(self, step: DraftStep, rows: StepRows) -> list[Drafts | None]:
        """Computes all rows, and drafts trees after the last rows of requests with a limit."""
        assert step.features is not None
        context = StepContext(step.batch, self._attention.plan(step.batch, self._workspace))
        states = self._network(0, step.next_ids, self._network.combine(step.features), context)
        chosen, hidden, logits = np.flatnonzero(rows.limits > 0), states.hidden, None
        if len(chosen):
            last = upload_joined([rows.last_rows[chosen]], torch.int64, step.next_ids.device)
            hidden, logits = hidden[last], self._logits(states.output[last])

        def compute(batch: ForwardBatch, ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
            nonlocal hidden
            states = self._network(0, ids, hidden[parents],
                                   StepContext(batch, self._attention.plan(batch, self._workspace)))
            hidden = states.hidden
            return self._logits(states.output)

        return grow_trees(step, rows, self._shape, self._head.token_ids, logits, rows.positions + 1, self._page_size,
                          compute)

    def _extend(self, step: DraftStep, rows: StepRows, chains: Chains, chosen: np.ndarray) -> torch.Tensor | None:
        """Computes all rows by every layer, each of which drafts one token of the ``chosen`` requests; returns the
        last layer's hidden states ``[n, hidden]`` of their last rows."""
        assert step.features is not None
        context = StepContext(step.batch, self._attention.plan(step.batch, self._workspace))
        hidden, ids, last = self._network.combine(step.features), step.next_ids, None
        if len(chosen):
            last = upload_joined([rows.last_rows[chosen]], torch.int64, ids.device)
        for layer in range(self._network.depth):
            states = self._network(layer, ids, hidden, context)
            drafts = None if last is None else chains.sample(self._logits(states.output[last]), chosen)
            hidden = states.hidden
            if layer + 1 < self._network.depth:
                ids = self._following_ids(step, ids, layer + 1, last, drafts)
        return None if last is None else hidden[last]

    def _following_ids(self, step: DraftStep, ids: torch.Tensor, ahead: int, last: torch.Tensor | None,
                       drafts: torch.Tensor | None) -> torch.Tensor:
        """Returns the tokens [T] one position after ``ids``: drafts at the ``last`` rows, and at the end of a chunk in
        the middle of a prompt the prompt's token ``ahead`` positions after the chunk."""
        following = ids.roll(-1)
        if last is not None and drafts is not None:
            following[last] = drafts
        columns, sampled = step.step.columns, set(step.step.sample_index)
        for index, req in enumerate(step.step.reqs):
            if index not in sampled:
                end = int(step.step.starts[index] + step.step.q_lens[index]) + ahead
                if end < req.tokens.count:
                    following[int(columns.qo_indptr[index + 1]) - 1] = int(req.tokens.view(end, end + 1)[0])
        return following

    def _continue(self, step: DraftStep, rows: StepRows, chains: Chains, chosen: np.ndarray,
                  hidden: torch.Tensor) -> None:
        """Drafts the tokens after the first ``depth`` ones: the last layer reads its own hidden states."""
        layer, depth = self._network.depth - 1, self._network.depth
        going = chosen[rows.limits[chosen] > depth]
        last_positions = rows.positions[going] + rows.limits[going] - depth
        pages = DraftPages(rows.page_tables(going), last_positions, self._page_size, step.next_ids.device)
        drafts, index_of, current = chains.newest, np.arange(len(going)), chosen
        for ahead in range(1, int(rows.limits.max()) - depth + 1):
            keeps = rows.limits[current] >= depth + ahead
            if not keeps.all():
                kept = upload_joined([np.flatnonzero(keeps)], torch.int64, drafts.device)
                hidden, drafts, current = hidden[kept], drafts[kept], current[keeps]
                index_of = np.searchsorted(going, current)
            batch = pages.decode_batch(index_of, rows.positions[current] + ahead, drafts)
            states = self._network(layer, drafts, hidden,
                                   StepContext(batch, self._attention.plan(batch, self._workspace)))
            drafts, hidden = chains.sample(self._logits(states.output), current), states.hidden

    @torch.inference_mode()
    def draft_chains(self, step: ChainStep) -> None:
        """Drafts as many tokens as ``step`` asks for, of all requests; see ChainDrafter."""
        if not step.num_drafts and self._network.depth == 1:
            self._store_chains(step)
            return
        ids, hidden = self._extend_chains(step)
        depth = self._network.depth
        for draft in range(depth, step.num_drafts):
            batch = step.batches.of_pass(step.accepted.passes, draft - depth, ids)
            states = self._network(depth - 1, ids, hidden, self._context(batch, step.max_length))
            hidden = states.hidden
            ids = step.sample(self._logits(states.output), draft, self._head.token_ids)

    def _store_chains(self, step: ChainStep) -> None:
        """Stores keys and values of all rows. Where attention can, nothing of the last layer after them is computed.
        """
        assert step.features is not None
        context = self._context(step.batches.of_stored_rows(step.placed.rows), step.max_length)
        self._network(0, step.accepted.next_ids, self._network.combine(step.features), context,
                      context.attention.attends_last_tokens)

    def _extend_chains(self, step: ChainStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all rows by every layer; returns the last draft [B] and hidden states [B, hidden] of the last layer.

        Void rows read samples that may be of no use: what is stored at their positions is overwritten by the next step
        before a row reads it, as it begins at the newest token.
        """
        assert step.features is not None
        accepted, last = step.accepted, self._network.depth - 1
        batch = step.batches.of_last_rows(step.placed.rows, accepted.last_rows, accepted.kv_last_page_len)
        context = self._context(batch, step.max_length)
        hidden, ids = self._network.combine(step.features), accepted.next_ids
        for layer in range(last + 1):
            trims = layer == last and context.attention.attends_last_tokens
            states = self._network(layer, ids, hidden, context, trims)
            output, hidden = states.output, states.hidden
            if not trims:
                output = gather_rows(output, accepted.last_rows)
            newest = step.sample(self._logits(output), layer, self._head.token_ids)
            if layer < last:  # the next one reads what follows these tokens: the draft, after the last of them
                ids = ids.roll(-1).scatter_(0, accepted.last_rows, newest)
        return newest, hidden if trims else gather_rows(hidden, accepted.last_rows)

    def _context(self, batch: ForwardBatch, max_length: int) -> StepContext:
        return StepContext(batch, self._attention.plan(batch, self._workspace, max_length=max_length))

    def _logits(self, output: torch.Tensor) -> torch.Tensor:
        return self._head.table.logits(output)
