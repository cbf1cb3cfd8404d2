"""A draft model's weights, and the checkpoint that has them: its own, or the model's."""

from __future__ import annotations

import torch

from ..api.identity import ModelIdentity
from ..config.draft_model import draft_args
from ..config.model import ModelSpec
from ..config.server import ModelArgs, ServerConfig
from ..models.registry import tensor_parts
from ..speculative.base import DraftModel
from ..weights.fingerprint import identify_draft
from ..weights.loader import check_weights, load_weights, silent
from ..weights.source import open_weights
from ..weights.staging import Destination


class DraftWeights:
    """Loads a draft model's weights again where they are the model checkpoint's (layers of multi-token prediction);
    those of a checkpoint of its own stay."""

    def __init__(self, config: ServerConfig, spec: ModelSpec, model: DraftModel):
        """``spec`` is that of the model which ``model`` drafts for."""
        path = config.speculative.speculative_draft_model_path
        self._spec, self._model = spec, model
        self._identity: ModelIdentity | None = None
        self._sent: str | None = None
        self._in_checkpoint = path is None or path == config.model.model_path
        self._args = config.model if path is None else draft_args(config)

    @property
    def identity(self) -> ModelIdentity:
        """Reads the checkpoint at first; raises ConfigError for files that cannot be read."""
        if self._identity is None:
            self._identity = identify_draft(self._args)
        return self._identity if self._sent is None else self._identity.updated(self._sent, 0)

    def destinations(self) -> list[Destination]:
        """Returns what takes weights that a trainer sends under the names of the model's checkpoint: none where the
        draft model has a checkpoint of its own."""
        if not self._in_checkpoint:
            return []
        return [Destination(self._model.slots, lambda name: False, tensor_parts(self._spec))]

    def pushed(self, digest: str) -> None:
        """Records that tensors were copied over the checkpoint's; ``digest`` is that of all."""
        self._sent = digest if self._in_checkpoint else None

    def check(self, args: ModelArgs) -> None:
        """Raises ConfigError where ``update`` could not load the model's new checkpoint; changes nothing."""
        if self._in_checkpoint:
            check_weights(open_weights(args), self._model.slots(), parts=tensor_parts(self._spec))

    @torch.no_grad()
    def update(self, args: ModelArgs) -> None:
        """Loads the weights from the model's new checkpoint, where they were in the last one's."""
        if self._in_checkpoint:
            load_weights(open_weights(args), self._model.slots(), silent, tied=False, on_other_stage=lambda name: True,
                         parts=tensor_parts(self._spec))
            self._args, self._identity, self._sent = args, None, None
