"""STANDALONE: a smaller model of the same vocabulary, which reads tokens only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.speculative.place_chains import place_rows
from ..api.drafts import Drafts
from ..attention.base import AttentionPlanner
from ..attention.workspace import AttentionWorkspace
from ..config.draft_model import naming_draft
from ..config.model import ModelSpec
from ..config.server.speculative import SPECULATIVE_ALGORITHMS
from ..forward.forward_batch import ForwardBatch, indptr_of, ragged_positions
from ..forward.host_copies import upload_joined
from ..forward.step_context import StepContext
from ..kvcache.layout import KVLayout
from ..kvcache.pool import KVPool
from ..models.decoder.causal_lm import CausalLM
from ..models.drafts.network import DraftHead
from ..models.registry import build_model, tensor_parts
from ..weights.loader import load_weights
from ..weights.slots import Slot
from ..weights.source import open_weights
from .base import Algorithm, ChainStep, DraftContext, Drafter, DraftModel, DraftStep, Features
from .draft.chains import Chains, StepRows
from .draft.checkpoint import (
    DraftCheckpoint,
    check_tokenizer,
    draft_allocator,
    draft_attention,
    draft_layout,
    local_parallel,
)
from .draft.head import restricted
from .draft.pages import DraftPages
from .draft.trees import TreeShape, grow_trees, tree_shape


@dataclass(frozen=True)
class StandaloneDraftModel:
    """A loaded ``model`` of ``spec``."""

    context: DraftContext
    spec: ModelSpec
    model: CausalLM
    head: DraftHead
    layout: KVLayout

    features: Features | None = None
    shifted = False

    def make_drafter(self, pool: KVPool, workspace: AttentionWorkspace) -> Drafter:
        return StandaloneDrafter(self.model, self.head, draft_attention(self.context, self.spec, pool), workspace,
                                 pool.layout.page_size, tree_shape(self.context.config.speculative))

    def slots(self) -> Iterator[Slot]:
        yield from self.model.slots()


class StandaloneDrafter:
    """Drafts chains or trees by a model over its pool, which has the keys and values of all right tokens of a step, and
    of the newest one where drafts follow it."""

    def __init__(self, model: CausalLM, head: DraftHead, attention: AttentionPlanner, workspace: AttentionWorkspace,
                 page_size: int, shape: TreeShape):
        """``shape``: of a chain, where one candidate is expanded at a time."""
        self._model = model
        self._head = head
        self._attention = attention
        self._workspace = workspace
        self._page_size = page_size
        self._shape = shape

    @torch.inference_mode()
    def run(self, step: DraftStep) -> list[Drafts | None]:
        rows = StepRows(step)
        if self._shape.topk == 1:
            rows.limits = np.minimum(rows.limits, self._shape.num_steps)
        pages, batch = self._extended(step, rows)
        logits = self._logits(batch)
        if self._shape.topk > 1:
            return grow_trees(step, rows, self._shape, self._head.token_ids, logits, rows.positions + 2,
                              self._page_size, lambda batch, ids, parents: self._logits(batch))
        chains = Chains(step, rows, self._head.token_ids)
        current = np.flatnonzero(rows.limits > 0)
        if not len(current):
            return chains.drafts()
        drafts = chains.sample(logits, current)
        for ahead in range(1, int(rows.limits.max())):
            keeps = rows.limits[current] > ahead
            if not keeps.all():
                drafts = drafts[upload_joined([np.flatnonzero(keeps)], torch.int64, drafts.device)]
                current = current[keeps]
            batch = pages.decode_batch(rows.requests[current], rows.positions[current] + 1 + ahead, drafts)
            drafts = chains.sample(self._logits(batch), current)
        return chains.drafts()

    @torch.inference_mode()
    def draft_chains(self, step: ChainStep) -> None:
        """Drafts as many tokens as ``step`` asks for, of all requests; see ChainDrafter.

        Computes the first row's token and all samples, of which the newest token is one. The step before may not have
        computed the first row's: where a request got no drafts it ends before its newest token.
        """
        accepted, batches = step.accepted, step.batches
        rows = place_rows(step.placed.rows.starts, accepted.sequences, batches.pages)
        batch = batches.of_last_rows(rows, accepted.newest_rows, accepted.passes.kv_last_page_len[0])
        ids = accepted.newest
        for draft in range(step.num_drafts):
            if draft:
                batch = batches.of_pass(accepted.passes, draft, ids)
            ids = step.sample(self._logits(batch, step.max_length), draft, self._head.token_ids)

    def _extended(self, step: DraftStep, rows: StepRows) -> tuple[DraftPages, ForwardBatch]:
        """Returns the pages of all requests, and the batch of their right rows, with their newest token behind where
        drafts follow; the last rows of those get logits."""
        columns, ids = step.step.columns, step.batch.input_ids
        starts = step.step.starts
        kept = np.diff(columns.qo_indptr).astype(np.int64)
        kept[rows.requests] = rows.last_rows - columns.qo_indptr[rows.requests] + 1
        lengths = kept.copy()
        drafting = rows.limits > 0
        lengths[rows.requests[drafting]] += 1
        indptr = indptr_of(lengths)
        # Rows of the step's tokens, then of those that follow them.
        sources = ragged_positions(columns.qo_indptr[:-1].astype(np.int64), lengths, indptr)
        newest = indptr[1:][rows.requests[drafting]].astype(np.int64) - 1
        sources[newest] = len(ids) + rows.last_rows[drafting]
        tokens = torch.cat([ids, step.next_ids])[upload_joined([sources], torch.int64, ids.device)]
        last_positions = starts + lengths - 1
        last_positions[rows.requests] += np.maximum(rows.limits - 1, 0)
        tables = [req.page_table for req in step.step.reqs if req.page_table is not None]
        pages = DraftPages(tables, last_positions, self._page_size, ids.device)
        return pages, pages.batch(np.arange(len(starts)), starts, lengths, tokens, newest)

    def _logits(self, batch: ForwardBatch, max_length: int | None = None) -> torch.Tensor:
        plan = self._attention.plan(batch, self._workspace, max_length=max_length)
        hidden = self._model.hidden_states(StepContext(batch, plan))
        return self._head.table.logits(hidden)


def load(context: DraftContext) -> DraftModel:
    """Loads the model of --speculative-draft-model-path; raises ConfigError where its tokenizer is another."""
    checkpoint = DraftCheckpoint.of_flags(context)
    check_tokenizer(context.config, checkpoint.args)
    spec, local = checkpoint.spec, local_parallel(context.parallel)
    with naming_draft():
        model = build_model(spec, local, getattr(torch, context.dtype), context.device)
        load_weights(open_weights(checkpoint.args), model.slots(), context.progress, tied=spec.tie_word_embeddings,
                     unused=spec.unused_names, parts=checkpoint.parts(tensor_parts(spec)))
    assert model.lm_head is not None
    head = checkpoint.narrowed(restricted(context, model.lm_head, draft_allocator(context, spec)))
    return StandaloneDraftModel(context, spec, model, head,
                                draft_layout(context.config, spec, local.attn_tp.size, context.dtype))


SPECULATIVE_ALGORITHMS.register("STANDALONE", traits=(
    "device", "draft_path", "token_map", "reads_model"))(Algorithm(load=load))
