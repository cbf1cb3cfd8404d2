"""NEXTN: layers of multi-token prediction, which checkpoints have after the model's own; see models/drafts/mtp.py.

They are in the model's checkpoint, as ``model.layers.N`` after its N layers, or in one of their own, as
``model.layers.0`` (SGLang's NextN checkpoints). Embedding and head are the model's, of which some have copies.
"""

from __future__ import annotations

import re

from ..api.errors import ConfigError
from ..config.draft_model import naming_draft
from ..config.model import ModelSpec
from ..config.server.speculative import SPECULATIVE_ALGORITHMS
from ..distributed.parallel import Parallel
from ..layers.rotary import rotary_table
from ..models.drafts.mtp import MTPNetwork, mtp_spec
from ..models.registry import blocks_of, tensor_parts
from ..weights.loader import OnOtherStage, load_weights
from ..weights.source import open_weights
from .base import Algorithm, DraftContext, DraftModel, Features
from .draft.checkpoint import DraftCheckpoint, draft_allocator, draft_layout, local_parallel
from .draft.head import model_head
from .draft.shifted import ShiftedDraftModel

_FIRST_NORM = re.compile(r"model\.layers\.(\d+)\.enorm\.weight")
_SHARED = (".embed_tokens.weight", ".shared_head.head.weight")
"""A layer's tensors that are copies of the model's own."""


def load(context: DraftContext) -> DraftModel:
    """Loads the layers of --speculative-draft-model-path, by default those of the model's checkpoint. Raises
    ConfigError where there are none, or where they are not for the model."""
    local = local_parallel(context.parallel)
    flags = context.config.speculative
    path = flags.speculative_draft_model_path
    if path is None or (path == context.config.model.model_path and flags.draft_format is None):
        spec, args, first, depth = context.spec, context.config.model, context.spec.num_layers, context.spec.mtp_layers
    else:
        checkpoint = DraftCheckpoint.of_flags(context)
        spec, args = checkpoint.spec, checkpoint.args
        checkpoint.check_hidden_size(context, spec.hidden_size)
        first, depth = _numbers(checkpoint)
    if depth > 1 and flags.topk > 1:
        raise ConfigError(f"The {depth} layers of multi-token prediction draft one token each, as chains: leave "
                          "--speculative-eagle-topk out.")
    if not depth:
        raise ConfigError(f"{args.model_path} has no layers of multi-token prediction: num_nextn_predict_layers of its "
                          "config.json is not there, or 0; name others by --speculative-draft-model-path.")
    network = _network(context, spec, first, depth, local)
    with naming_draft():
        load_weights(open_weights(args), network.slots(), context.progress, tied=False,
                     on_other_stage=_is_not_own(first, depth), parts=tensor_parts(spec))
    own = mtp_spec(spec, first, depth)
    return ShiftedDraftModel(context, own, network, model_head(context, local, draft_allocator(context, spec)),
                             Features(), draft_layout(context.config, own, local.attn_tp.size, context.dtype))


def _network(context: DraftContext, spec: ModelSpec, first: int, depth: int, local: Parallel) -> MTPNetwork:
    blocks, embed = blocks_of(spec, local), context.model.embed_tokens
    assert embed is not None
    cos_sin = rotary_table(blocks.rope, blocks.rotary_dim or blocks.rope.rotary_dim(spec.head_dim),
                           spec.context_length, context.device)
    return MTPNetwork(spec, first, depth, local, draft_allocator(context, spec), blocks, embed, cos_sin)


def _numbers(checkpoint: DraftCheckpoint) -> tuple[int, int]:
    """Returns the number of the first layer in a checkpoint, and how many there are."""
    if checkpoint.is_dummy:
        return 0, checkpoint.spec.mtp_layers
    numbers = sorted(int(found[1]) for name in checkpoint.tensor_names(None) if (found := _FIRST_NORM.fullmatch(name)))
    return (numbers[0], len(numbers)) if numbers else (0, 0)


def _is_not_own(first: int, depth: int) -> OnOtherStage:
    """Returns a predicate: whether a tensor of the checkpoint is none of a draft layer's own."""
    prefixes = tuple(f"model.layers.{first + index}." for index in range(depth))

    def is_not_own(name: str) -> bool:
        return not name.startswith(prefixes) or name.endswith(_SHARED)

    return is_not_own


SPECULATIVE_ALGORITHMS.register("NEXTN", traits=("device", "shifted", "token_map", "reads_mtp"))(Algorithm(load=load))
