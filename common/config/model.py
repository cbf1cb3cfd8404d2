"""The specification of a model: what the engine needs to know of it. It imports no torch: the API server reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..api.errors import ConfigError
from .mla import MLASpec
from .moe import MoESpec
from .quantization import QuantFormat
from .scores import PLAIN_SCORES, Scores
from .state import StateSpec
from .window import Windows

if TYPE_CHECKING:
    from .server.offload import OffloadArgs

Head = Literal["lm", "classifier", "none"]


@dataclass(frozen=True)
class ModelSpec:
    """Facts of a decoder-only model that the engine needs, whatever its family.

    ``dtype`` is the checkpoint's. ``context_length`` is the longest prompt plus output in tokens. ``head`` turns hidden
    states into logits of the vocabulary (lm), into scores of ``num_labels`` labels (classifier), or is absent.
    ``intermediate_size`` is the width of the MLPs that are no mixture of experts; ``moe`` describes the mixtures. With
    ``mla`` queries have ``head_dim`` values, and its latents are the one KV head. ``windows`` has each layer's sliding
    window, and ``scores`` says how attention makes its weights of queries and keys. ``mtp_layers`` of multi-token
    prediction follow in the checkpoint. ``state``: that of a hybrid model's recurrent layers.

    ``family`` is the own specification of the model's family, a frozen dataclass that only the family's file reads.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    context_length: int
    head: Head = "lm"
    num_labels: int = 0
    moe: MoESpec | None = None
    quantization: QuantFormat | None = None
    mla: MLASpec | None = None
    mtp_layers: int = 0
    windows: Windows = ()
    scores: Scores = PLAIN_SCORES
    encoder: bool = False  # tokens attend to all of their sequence, which is computed whole, without a KV cache
    pooling: Literal["last", "cls"] = "last"  # of embeddings, where neither a flag nor the checkpoint says another
    state: StateSpec | None = None
    implementation: str = ""  # the name under which the family is registered, where it is not the architecture's
    offload: OffloadArgs | None = None  # of a rank's own model; no fact of the checkpoint
    dropped_eos_ids: tuple[int, ...] = ()  # the checkpoint names them, and the model does not have them
    family: Any = None

    def facts(self) -> dict[str, Any]:
        """Returns the facts that are not at their defaults, the family's own among them, under their names."""
        return {**_facts_of(self), **({} if self.family is None else _flat_facts(self.family))}

    def windows_of(self, layers: range) -> Windows:
        """Returns the window of each of some layers; None also where a window covers the whole context."""
        stated = self.windows or (None,) * self.num_layers
        return tuple(None if window is None or window >= self.context_length else window
                     for window in stated[layers.start:layers.stop])

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pool; that of an encoder only counts tokens."""
        return 1 if self.encoder else self.num_layers

    @property
    def kv_dim(self) -> int:
        """Values of a token in a KV head: of its key, and again of its value; or of its latent."""
        return self.head_dim if self.mla is None else self.mla.latent_dim

    @property
    def unused_names(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors in the checkpoint that the model does not use."""
        return tuple(f"model.layers.{self.num_layers + i}." for i in range(self.mtp_layers))

    def check_tp(self, size: int, mlp_size: int | None = None, *, whole_dense: bool = False) -> None:
        """Raises ConfigError where ``size`` ranks cannot split attention evenly, or ``mlp_size`` ranks the MLPs, those
        of a mixture's layers without experts not with ``whole_dense``."""
        mlp_size = mlp_size or size
        width = self.intermediate_size if self.num_dense_layers and not whole_dense else 0
        if self.num_heads % size or width % mlp_size:
            raise ConfigError(f"--tp-size {size} must divide the model's {self.num_heads} attention heads and its "
                              f"intermediate size {self.intermediate_size}.")
        if self.moe is not None and self.moe.shared_size % mlp_size:
            raise ConfigError(f"--tp-size {size} must divide the shared expert's intermediate size "
                              f"{self.moe.shared_size}.")
        if self.state is not None and self.state.num_heads % size:
            raise ConfigError(f"--tp-size {size} must divide the {self.state.num_heads} {self.state.head_name} of the "
                              "model's recurrent layers.")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ConfigError(f"--tp-size {size} must divide the model's {self.num_kv_heads} KV heads or be a "
                              f"multiple of them.")

    @property
    def num_dense_layers(self) -> int:
        """Number of layers whose MLP is no mixture of experts."""
        return self.num_layers - (len(self.moe.layers) if self.moe is not None else 0)

    def kv_layers(self, layers: range) -> tuple[int, ...]:
        """Returns those of some layers that have keys and values."""
        return tuple(layer for layer in layers if self.state is None or layer in self.state.attention_layers)

    def local_kv_heads(self, tp_size: int) -> int:
        """Returns the KV heads of one rank; with more ranks than KV heads each head is replicated."""
        return max(1, self.num_kv_heads // tp_size)


def _facts_of(spec: Any) -> dict[str, Any]:
    return {field.name: value for field in dataclasses.fields(spec)
            if field.name not in ("family", "offload") and (value := getattr(spec, field.name)) != field.default}


def _flat_facts(own: Any) -> dict[str, Any]:
    """Returns the facts of a family's specification; those of dataclasses within it are among its own."""
    facts: dict[str, Any] = {}
    for name, value in _facts_of(own).items():
        facts.update(_flat_facts(value) if dataclasses.is_dataclass(value) else {name: value})
    return facts
