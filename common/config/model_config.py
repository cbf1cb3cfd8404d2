"""A checkpoint's configuration, and what every model family reads of it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.errors import ConfigError
from .defaults import with_defaults
from .mla import MLASpec
from .model import Head, ModelSpec
from .moe import MoESpec
from .quantization import choose_quantization
from .scores import PLAIN_SCORES, Scores
from .server import ModelArgs
from .state import StateSpec
from .window import Windows

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's configuration, as a family reads it.

    ``values`` are those of ``config.json``, with the family's defaults for keys that it lacks. ``eos_token_ids`` are
    those that the checkpoint's files name. ``args`` are the server's flags of the model.
    """

    architecture: str
    values: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    args: ModelArgs

    @classmethod
    def complete(cls, architecture: str, given: Mapping[str, Any], generation: Mapping[str, Any] | None,
                 defaults: Mapping[str, Any], args: ModelArgs) -> ModelConfig:
        """Completes ``given`` (config.json) by a family's ``defaults``. ``generation`` is generation_config.json, None
        where there is none."""
        values = with_defaults(given, defaults)
        eos_ids = _eos_token_ids(values, {}) if generation is None else _eos_token_ids(given, generation)
        return cls(architecture, values, eos_ids, args)

    @property
    def head_dim(self) -> int:
        """Values of a head: as stated, else the hidden size divided by the heads."""
        stated: int | None = self.values.get("head_dim")
        return stated or self.values["hidden_size"] // self.values["num_attention_heads"]

    def spec(self, longest_context: int, family: Any, *, num_kv_heads: int | None = None, head_dim: int | None = None,
             windows: Windows = (), moe: MoESpec | None = None, mla: MLASpec | None = None,
             scores: Scores = PLAIN_SCORES, state: StateSpec | None = None) -> ModelSpec:
        """Returns the model's specification, with what all families' configurations state under the same names.

        ``longest_context`` in tokens is the model's; ``family`` is the family's own specification. The others are
        ``ModelSpec``'s; without them KV heads and their size are read as Llama's are. Raises ConfigError for flags that
        do not fit the model, and KeyError for what is missing.
        """
        config = self.values
        has = range(config["vocab_size"])
        head = _head(self.architecture, self.args)
        return ModelSpec(
            architecture=self.architecture, hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=num_kv_heads or config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=head_dim or self.head_dim, intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"], tie_word_embeddings=bool(config["tie_word_embeddings"]),
            dtype=_dtype(config), eos_token_ids=tuple(id for id in self.eos_token_ids if id in has),
            context_length=_context_length(longest_context, self.args), head=head,
            num_labels=_num_labels(config) if head == "classifier" else 0, moe=moe,
            quantization=choose_quantization(config, self.args.quantization), mla=mla,
            mtp_layers=next((config[name] for name in _MTP_COUNTS if config.get(name)), 0), windows=windows,
            scores=scores, state=state,
            dropped_eos_ids=tuple(id for id in self.eos_token_ids if id not in has), family=family)



_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names of the number of layers of multi-token prediction."""

def check_silu(config: ModelConfig) -> None:
    """Raises ConfigError for a checkpoint whose MLPs have another activation than silu."""
    if (act := config.values.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"Activation {act!r} is not supported: use a checkpoint with hidden_act 'silu'.")


def _context_length(longest: int, args: ModelArgs) -> int:
    context_length = args.context_length or longest
    if not 0 < context_length <= longest:
        raise ConfigError(f"--context-length {context_length} must be between 1 and the model's {longest}.")
    return context_length


def _head(architecture: str, args: ModelArgs) -> Head:
    """Returns the architecture's head; raises ConfigError where the server is to generate and the model cannot."""
    head: Head = "lm"
    if "ForSequenceClassification" in architecture or architecture.endswith("RewardModel"):
        head = "classifier"
    elif architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
        head = "none"
    if head != "lm" and not args.is_embedding:
        raise ConfigError(f"{architecture} does not generate text: serve it with --is-embedding.")
    return head


def _num_labels(config: Mapping[str, Any]) -> int:
    """Counts labels as transformers does, which writes the count only where it differs from the labels' names."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"Checkpoint dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}.")
    return dtype


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos_ids: list[int] = []
    for source in (generation, config):
        ids = source.get("eos_token_id")
        eos_ids.extend(id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int))
    return tuple(dict.fromkeys(eos_ids))
