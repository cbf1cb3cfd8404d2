"""A checkpoint's layers of multi-token prediction, loaded beside the model whose tokens they foretell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..api.errors import ConfigError
from ..attention.base import AttentionPlanner
from ..config.checkpoint import resolve_checkpoint
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from ..models.causal_lm import CausalLM
from ..models.mtp import MTPDraftLayer, token_predictors
from ..weights.loader import Elsewhere, Progress, load_dummy, load_safetensors
from .attention_choice import AttentionChoice
from .kv_sizing import kv_layout, resolve_dtype

_SHARED = (".embed_tokens.weight", ".shared_head.head.weight")
"""Of a predictor in the checkpoint: copies of the model's own."""


class MTPDraftLayers:
    """Over a pool of their own, in which a token's page has the number that it has in the model's."""

    def __init__(self, model: CausalLM, layers: Sequence[MTPDraftLayer], attention: AttentionPlanner):
        self._model = model
        self._layers = layers
        self._attention = attention

    def __len__(self) -> int:
        return len(self._layers)

    @classmethod
    @torch.no_grad()
    def load(cls, config: ServerConfig, spec: ModelSpec, parallel: Parallel, model: CausalLM, num_pages: int,
             device: torch.device, progress: Progress) -> MTPDraftLayers:
        """Of ``model``, whose pool has ``num_pages``. Raises ConfigError where the checkpoint has none, or not whole,
        and where other stages of a pipeline hold the embedding or the head."""
        if not spec.mtp_layers:
            raise ConfigError(f"{config.model.model_path} has no layers of multi-token prediction: num_nextn_predict_"
                              "layers of its config.json is not there, or 0.")
        if parallel.stages.size > 1:
            raise ConfigError("Layers of multi-token prediction need the whole model: leave --pp-size out.")
        dtype = resolve_dtype(config, spec, device)
        try:
            layers = token_predictors(spec, parallel, getattr(torch, dtype), device)
            slots = [slot for layer in layers for slot in layer.slots()]
            if config.model.load_format == "dummy":
                load_dummy(slots, config.model.random_seed, progress)
            else:
                load_safetensors(resolve_checkpoint(config.model), slots, progress, tied=False,
                                 elsewhere=_outside(spec), stacked=spec.stacked_experts)
            own = dataclasses.replace(spec, num_layers=len(layers), windows=())
            pool = KVPool(kv_layout(config.cache, own, parallel.attention.size, dtype), num_pages, device)
        except torch.OutOfMemoryError:
            raise ConfigError(f"The layers of multi-token prediction do not fit on {device}: lower "
                              "--max-total-tokens.") from None
        return cls(model, layers, AttentionChoice(config, own, parallel, dtype).over(pool))

    @torch.inference_mode()
    def rows(self, batch: ForwardBatch, hidden: torch.Tensor, following: torch.Tensor) -> list[torch.Tensor]:
        """Of each predictor ``[T, hidden]``, which the model's head scores: the first one's tell of what stands two
        places behind the batch's tokens, each further one's of one place more.

        ``hidden`` [T, hidden] is the model's of ``batch``, behind its last norm; ``following`` [predictors, T] int64
        are the tokens one place behind the batch's, then two. Latents enter the pool at the batch's places.
        """
        assert self._model.embedding is not None
        self._attention.plan(batch)
        found = []
        for layer, ids in zip(self._layers, following):
            hidden = layer(hidden, self._model.embedding.embed(ids), self._attention, self._model.cos_sin)
            found.append(hidden)
        return found

    def guesses(self, batch: ForwardBatch, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens by ``rows``, ``[predictors, T]`` int64."""
        return torch.stack([self._model.scores(rows).argmax(-1) for rows in self.rows(batch, hidden, following)])


def _outside(spec: ModelSpec) -> Elsewhere:
    """Whether a tensor of the checkpoint is not a predictor's own."""
    def outside(name: str) -> bool:
        return not name.startswith(spec.unused_names) or name.endswith(_SHARED)

    return outside
