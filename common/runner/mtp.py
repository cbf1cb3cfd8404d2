"""A checkpoint's MTP draft layers, loaded in addition to the model for which they propose tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..api.errors import ConfigError
from ..attention.base import AttentionPlanner
from ..attention.workspace import AttentionWorkspace
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import StepContext
from ..kvcache.pool import KVPool
from ..models.decoder.causal_lm import CausalLM
from ..models.decoder.mtp import MTPDraftLayer
from ..models.registry import build_draft_layers, tensor_parts
from ..weights.loader import OnOtherStage, Progress, load_weights
from ..weights.source import open_weights
from .attention_choice import AttentionChoice
from .kv_sizing import kv_layout, resolve_dtype

_SHARED = (".embed_tokens.weight", ".shared_head.head.weight")
"""A draft layer's tensors in the checkpoint that are copies of the model's own."""


class MTPDraftLayers:
    """Draft layers with a KV pool of their own, in which a token's page has the same id as in the model's pool."""

    def __init__(self, model: CausalLM, layers: Sequence[MTPDraftLayer], attention: AttentionPlanner,
                 workspace: AttentionWorkspace):
        self._model = model
        self._layers = layers
        self._attention = attention
        self._workspace = workspace

    def __len__(self) -> int:
        return len(self._layers)

    @classmethod
    @torch.no_grad()
    def load(cls, config: ServerConfig, spec: ModelSpec, parallel: Parallel, model: CausalLM, num_pages: int,
             workspace: AttentionWorkspace, device: torch.device, progress: Progress) -> MTPDraftLayers:
        """Loads the draft layers of ``model``, whose pool has ``num_pages``. Raises ConfigError where the checkpoint
        has none or lacks some tensors, with pipeline parallelism, where other stages have the embedding or the head,
        and with data-parallel attention."""
        if not spec.mtp_layers:
            raise ConfigError(f"{config.model.model_path} has no layers of multi-token prediction: num_nextn_predict_"
                              "layers of its config.json is not there, or 0.")
        if parallel.pp.size > 1:
            raise ConfigError("Layers of multi-token prediction need the whole model: leave --pp-size out.")
        if parallel.dp_size > 1:
            raise ConfigError("Layers of multi-token prediction compute the tokens of one attention group: leave "
                              "--enable-dp-attention out.")
        dtype = resolve_dtype(config, spec, device)
        try:
            layers = build_draft_layers(spec, parallel, getattr(torch, dtype), device)
            slots = [slot for layer in layers for slot in layer.slots()]
            load_weights(open_weights(config.model), slots, progress, tied=False,
                         on_other_stage=_is_not_draft_tensor(spec), parts=tensor_parts(spec))
            own = dataclasses.replace(spec, num_layers=len(layers), windows=())
            pool = KVPool(kv_layout(config.cache, own, parallel.attn_tp.size, dtype), num_pages, device)
        except torch.OutOfMemoryError:
            raise ConfigError(f"The layers of multi-token prediction do not fit on {device}: lower "
                              "--max-total-tokens.") from None
        return cls(model, layers, AttentionChoice(config, own, parallel, dtype).over([pool]), workspace)

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, hidden: torch.Tensor, next_ids: torch.Tensor) -> list[torch.Tensor]:
        """Returns each draft layer's hidden states ``[T, hidden]``, for the model's LM head: the first layer's predict
        the tokens two positions after the batch's tokens, each further layer's those one position later.

        ``hidden`` [T, hidden] are the model's of ``batch``, after its final norm; ``next_ids`` [draft layers, T] int64
        are the tokens one position after the batch's, then two. Latents are stored at the batch's positions.
        """
        assert self._model.embed_tokens is not None
        step = StepContext(batch, self._attention.plan(batch, self._workspace))
        states = []
        for layer, ids in zip(self._layers, next_ids):
            hidden = layer(hidden, self._model.embed_tokens.embed(ids), step, self._model.cos_sin)
            states.append(hidden)
        return states

    def propose(self, batch: ForwardBatch, hidden: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """Returns draft tokens ``[draft layers, T]`` int64, the argmax of each layer; see ``hidden_states``."""
        return torch.stack([self._model.compute_logits(rows).argmax(-1)
                            for rows in self.hidden_states(batch, hidden, next_ids)])


def _is_not_draft_tensor(spec: ModelSpec) -> OnOtherStage:
    """Returns a predicate: whether a tensor of the checkpoint is none of a draft layer's own."""
    def is_not_draft_tensor(name: str) -> bool:
        return not name.startswith(spec.unused_names) or name.endswith(_SHARED)

    return is_not_draft_tensor
