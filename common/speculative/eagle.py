"""EAGLE: draft layers that read the model's last hidden states; see models/drafts/eagle.py.

As in SGLang, the name also stands for layers of multi-token prediction, where the model or the draft has these.
"""

from __future__ import annotations

from ..config.checkpoint import read_json, resolve_metadata
from ..config.draft_model import draft_args, flat_config, naming_draft
from ..config.server.speculative import SPECULATIVE_ALGORITHMS
from ..layers.rotary import rotary_table
from ..layers.vocab import VocabTable
from ..models.drafts.eagle import EagleNetwork
from ..models.registry import blocks_of, tensor_parts
from ..weights.loader import load_weights
from ..weights.source import open_weights
from . import nextn
from .base import Algorithm, DraftContext, DraftModel, Features
from .draft.checkpoint import DraftCheckpoint, draft_allocator, draft_layout, local_parallel
from .draft.head import model_head
from .draft.shifted import ShiftedDraftModel

_UNUSED = ("embed_tokens.", "lm_head.")


def load(context: DraftContext) -> DraftModel:
    """Loads the layers of --speculative-draft-model-path; raises ConfigError where they are not for the model."""
    if context.config.speculative.speculative_draft_model_path is None or _has_mtp_layers(context):
        return nextn.load(context)
    checkpoint = DraftCheckpoint.of_flags(context)
    spec, local = checkpoint.spec, local_parallel(context.parallel)
    checkpoint.check_hidden_size(context, spec.hidden_size)
    names = {name.removeprefix("model.") for name in checkpoint.tensor_names(tensor_parts(spec))}
    own_embed = "embed_tokens.weight" in names
    allocate = draft_allocator(context, spec)
    embed = context.model.embed_tokens
    if own_embed:
        embed = VocabTable("model.embed_tokens", spec.vocab_size, spec.hidden_size, local.attn_tp, allocate)
    assert embed is not None
    blocks = blocks_of(spec, local)
    cos_sin = rotary_table(blocks.rope, blocks.rotary_dim or blocks.rope.rotary_dim(spec.head_dim),
                           spec.context_length, context.device)
    bias = bool(checkpoint.values.get("bias", True)) if checkpoint.is_dummy else "fc.bias" in names
    network = EagleNetwork(spec, local, allocate, blocks, embed, cos_sin, own_embed=own_embed, bias=bias)
    with naming_draft():
        load_weights(open_weights(checkpoint.args), network.slots(), context.progress, tied=False,
                     on_other_stage=lambda name: name.removeprefix("model.").startswith(_UNUSED),
                     parts=checkpoint.parts(tensor_parts(spec)))
    return ShiftedDraftModel(context, spec, network, model_head(context, local, allocate), Features(),
                             draft_layout(context.config, spec, local.attn_tp.size, context.dtype))


def _has_mtp_layers(context: DraftContext) -> bool:
    with naming_draft():
        values = flat_config(read_json(resolve_metadata(draft_args(context.config)) / "config.json") or {})
    return bool(values.get("num_nextn_predict_layers"))


SPECULATIVE_ALGORITHMS.register("EAGLE", traits=(
    "device", "shifted", "token_map", "reads_eagle", "reads_mtp"))(Algorithm(load=load))
