"""EAGLE3: a draft layer that reads hidden states of three of the model's layers; see models/drafts/eagle3.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..api.errors import ConfigError
from ..config.draft_model import naming_draft
from ..config.model import ModelSpec
from ..config.server.speculative import SPECULATIVE_ALGORITHMS
from ..layers.rotary import rotary_table
from ..layers.vocab import VocabTable
from ..models.drafts.eagle3 import Eagle3Facts, Eagle3Network, tensor_parts
from ..models.drafts.network import DraftHead
from ..models.registry import blocks_of
from ..weights.loader import load_weights
from ..weights.slots import Slot, TensorKind
from ..weights.source import open_weights
from .base import Algorithm, DraftContext, DraftModel, Features
from .draft.checkpoint import DraftCheckpoint, draft_allocator, draft_layout, local_parallel
from .draft.head import model_head
from .draft.shifted import ShiftedDraftModel

_OFFSETS = TensorKind("a map of draft tokens", dummy_value=0.0)
_UNUSED = ("t2d", "embed_tokens.", "lm_head.")


def load(context: DraftContext) -> DraftModel:
    """Loads the head of --speculative-draft-model-path; raises ConfigError where it is not one for the model."""
    if not context.model.has_layer_inputs:
        raise ConfigError(f"{context.config.model.model_path} computes attention and MLP in parallel, so that a head "
                          "of --speculative-algorithm EAGLE3 cannot read the states between layers: leave it out.")
    checkpoint = DraftCheckpoint.of_flags(context)
    spec, values, local = checkpoint.spec, checkpoint.values, local_parallel(context.parallel)
    if spec.num_layers != 1:
        raise ConfigError(f"The draft model {checkpoint.args.model_path} has {spec.num_layers} layers: "
                          "--speculative-algorithm EAGLE3 reads heads of one.")
    state_size = values.get("target_hidden_size") or spec.hidden_size
    checkpoint.check_hidden_size(context, state_size)
    layers = layers_read(values, context.spec)
    parts = checkpoint.parts(tensor_parts)
    names = checkpoint.tensor_names(parts)
    has_map, has_head = "d2t" in names or checkpoint.is_dummy, "lm_head.weight" in names or checkpoint.is_dummy
    own_embed = "embed_tokens.weight" in names or state_size != spec.hidden_size
    allocate = draft_allocator(context, spec)
    embed = context.model.embed_tokens
    if own_embed:
        embed = VocabTable("embed_tokens", spec.vocab_size, spec.hidden_size, local.attn_tp, allocate)
    assert embed is not None
    blocks = blocks_of(spec, local)
    cos_sin = rotary_table(blocks.rope, blocks.rotary_dim or blocks.rope.rotary_dim(spec.head_dim),
                           spec.context_length, context.device)
    network = Eagle3Network(spec, facts_of(values, names, len(layers), state_size), local, allocate, blocks, embed,
                            cos_sin, own_embed=own_embed)
    slots = list(network.slots())
    draft_vocab = values.get("draft_vocab_size") or spec.vocab_size
    if draft_vocab == checkpoint.vocab_size and not has_map:
        draft_vocab = spec.vocab_size
    offsets = torch.zeros(draft_vocab, dtype=torch.int64, device=context.device)
    if has_map:
        slots.append(Slot("d2t", offsets, (draft_vocab,), kind=_OFFSETS))
    if has_head:
        table = VocabTable("lm_head", draft_vocab, spec.hidden_size, local.attn_tp, allocate)
        slots += table.slots()
    else:
        table = model_head(context, local, allocate).table
    with naming_draft():
        load_weights(open_weights(checkpoint.args), slots, context.progress, tied=False,
                     on_other_stage=lambda name: name.startswith(_UNUSED), parts=parts)
    is_reduced = draft_vocab not in (spec.vocab_size, checkpoint.vocab_size)
    head = DraftHead(table, _token_ids(checkpoint, offsets) if is_reduced or has_map else None)
    if has_head:
        head = checkpoint.narrowed(head)
    return ShiftedDraftModel(context, spec, network, head, Features(layers),
                             draft_layout(context.config, spec, local.attn_tp.size, context.dtype))


def layers_read(values: Mapping[str, Any], model: ModelSpec) -> tuple[int, ...]:
    """Returns the layers of the model whose input a head reads.

    ``eagle_aux_hidden_state_layer_ids`` within ``eagle_config`` name the layers of which they are the output (SGLang,
    SpecForge), at the top the layers that they enter (vLLM). The default is EAGLE-3's. Raises ConfigError.
    """
    nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    stated = values.get("eagle_aux_hidden_state_layer_ids")
    count = model.num_layers
    layers = (2, count // 2, count - 3)
    if nested:
        layers = tuple(layer + 1 for layer in nested)
    elif stated:
        layers = tuple(stated)
    if not all(type(layer) is int and 0 <= layer <= count for layer in layers):
        raise ConfigError(f"The draft model reads hidden states of the layers {list(layers)}, and the model has {count}"
                          " layers: use a draft model that was trained for it.")
    return layers


def facts_of(values: Mapping[str, Any], names: set[str], num_states: int, state_size: int) -> Eagle3Facts:
    """Returns the facts of a head, by its config.json and by the tensors that it has."""
    options = {**values, **(values.get("eagle_config") or {})}
    return Eagle3Facts(num_states, state_size, bias="fc.bias" in names,
                       input_norm=bool(options.get("norm_before_fc")) or "input_norm.weight" in names,
                       state_norms=bool(options.get("fc_norm")) or "fc_norm.0.weight" in names,
                       norm_before_residual=bool(options.get("norm_before_residual")))


def _token_ids(checkpoint: DraftCheckpoint, offsets: torch.Tensor) -> torch.Tensor:
    """Returns the model's token of each of the draft's; ``d2t`` has the differences."""
    ids = offsets + torch.arange(len(offsets), device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= checkpoint.spec.vocab_size:
        raise ConfigError(f"The draft model {checkpoint.args.model_path} has draft tokens (d2t) that are not among the "
                          f"model's {checkpoint.spec.vocab_size}: use a draft model that was trained for it.")
    return ids


SPECULATIVE_ALGORITHMS.register("EAGLE3", traits=(
    "device", "shifted", "draft_path", "reads_eagle3"))(Algorithm(load=load))
