"""The heads of draft models: the model's own, or a part of it."""

from __future__ import annotations

import torch

from ...distributed.parallel import Parallel
from ...layers.vocab import VocabTable
from ...models.drafts.network import DraftHead
from ...models.registry import tensor_parts
from ...weights.loader import load_weights
from ...weights.slots import Allocate
from ...weights.source import open_weights
from ..base import DraftContext
from .checkpoint import read_token_map


def model_head(context: DraftContext, local: Parallel, allocate: Allocate) -> DraftHead:
    """Returns the model's head for a draft model of the groups ``local``, restricted to the tokens of
    --speculative-token-map. Where the head is split over attention groups, it is loaded once more."""
    model = context.model
    table = model.lm_head
    assert table is not None
    if table is not model.embed_tokens and table.tp.size != local.attn_tp.size:
        table = VocabTable("lm_head", context.spec.vocab_size, context.spec.hidden_size, local.attn_tp, allocate,
                           bias=table.bias is not None)
        load_weights(open_weights(context.config.model), list(table.slots()), context.progress, tied=False,
                     on_other_stage=lambda name: True, parts=tensor_parts(context.spec))
    return restricted(context, table, allocate)


def restricted(context: DraftContext, table: VocabTable, allocate: Allocate) -> DraftHead:
    """Returns a head of the rows of ``table`` that --speculative-token-map names; of all without one (FR-Spec,
    arXiv:2502.14856)."""
    path = context.config.speculative.speculative_token_map
    if path is None:
        return DraftHead(table)
    ids = read_token_map(path, table.vocab_size).to(context.device)
    return DraftHead(rows_of(table, ids, allocate), ids)


def rows_of(table: VocabTable, ids: torch.Tensor, allocate: Allocate) -> VocabTable:
    """Returns a table of the rows ``ids`` [n] of ``table``, split anew over its ranks."""
    own = VocabTable(table.name, len(ids), table.weight.shape[1], table.tp, allocate, bias=table.bias is not None)
    own.weight[:own.used] = table.embed(ids)[own.start:own.start + own.used]
    if table.bias is not None and own.bias is not None:
        biases = table.tp.all_gather_last_dim(table.bias[None])[0]
        own.bias[:own.used] = biases[ids][own.start:own.start + own.used]
    return own
