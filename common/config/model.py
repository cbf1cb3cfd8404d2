"""Reads a checkpoint's configuration, as plain JSON, so that the API server needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..api.errors import ConfigError
from .checkpoint import read_json, resolve_metadata
from .defaults import with_defaults
from .mla import MLASpec, latent_attention
from .moe import MoESpec, Stacked, deepseek_experts, gpt_oss_experts, mixtral_experts, qwen_experts
from .quantization import QuantFormat, choose_quantization
from .server import ModelArgs
from .window import (
    ReadWindows,
    Windows,
    no_window,
    window_of_all_layers,
    window_of_alternating_layers,
    window_of_flagged_layers,
)

DTYPES = ("float32", "float16", "bfloat16")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


@dataclass(frozen=True)
class Architecture:
    """Differences of a model family from the common decoder; biases that depend on the checkpoint are read from it."""

    qkv_bias: bool = False
    qk_norm: bool = False
    biases_in_config: bool = False
    windows: ReadWindows = no_window
    sinks: bool = False  # a learned logit a head joins its softmax
    experts: Callable[[Mapping[str, Any]], MoESpec | None] | None = None
    latent: bool = False  # multi-head latent attention


Head = Literal["lm", "classifier", "none"]

_QWEN_WINDOWS = partial(window_of_flagged_layers, slides=lambda layer, last: layer >= last)
_FAMILIES = {
    "Llama": Architecture(biases_in_config=True),
    "Mistral": Architecture(windows=window_of_all_layers),
    "Qwen2": Architecture(qkv_bias=True, windows=_QWEN_WINDOWS),
    "Qwen3": Architecture(qk_norm=True, biases_in_config=True, windows=_QWEN_WINDOWS),
    "Mixtral": Architecture(windows=window_of_all_layers, experts=mixtral_experts),
    "Qwen2Moe": Architecture(qkv_bias=True, experts=qwen_experts, windows=partial(
        window_of_flagged_layers, slides=lambda layer, last: layer < last and layer % 2 == 0)),
    "Qwen3Moe": Architecture(qk_norm=True, biases_in_config=True, experts=qwen_experts, windows=partial(
        window_of_flagged_layers, slides=lambda layer, last: True)),
    "GptOss": Architecture(biases_in_config=True, windows=window_of_alternating_layers, sinks=True,
                           experts=gpt_oss_experts),
    "DeepseekV2": Architecture(biases_in_config=True, experts=partial(deepseek_experts, version=2), latent=True),
    "DeepseekV3": Architecture(biases_in_config=True, experts=partial(deepseek_experts, version=3), latent=True),
}
_HEADS: dict[str, Head] = {"ForCausalLM": "lm", "ForSequenceClassification": "classifier", "Model": "none"}
ARCHITECTURES = {family + head: architecture for head in _HEADS for family, architecture in _FAMILIES.items()}
"""Supported architectures, by transformers' names."""


@dataclass(frozen=True)
class ModelSpec:
    """Facts of a decoder-only model, whatever its family.

    ``rope_scaling`` is None for plain rotary embeddings, else a dict with ``rope_type`` and that type's
    parameters under transformers' names. ``dtype`` is the checkpoint's. ``context_length`` is the longest prompt
    plus output in tokens. ``head`` turns hidden states into logits of the vocabulary (lm), into scores of
    ``num_labels`` labels (classifier), or is absent. With ``mla`` queries have ``head_dim``
    values, and its latents are the one KV head. ``mtp_layers`` of multi-token prediction follow in the checkpoint.
    ``sinks``: each head has a logit that joins the denominator of its softmax.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
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
    sinks: bool = False
    dropped_eos_ids: tuple[int, ...] = ()  # the checkpoint names them, and the model does not have them

    def windows_of(self, layers: range) -> Windows:
        """Returns the window of each of some layers; None also where a window covers the whole context."""
        stated = self.windows or (None,) * self.num_layers
        return tuple(None if window is None or window >= self.context_length else window
                     for window in stated[layers.start:layers.stop])

    @property
    def kv_dim(self) -> int:
        """Values of a token in a KV head: of its key, and again of its value; or of its latent."""
        return self.head_dim if self.mla is None else self.mla.latent_dim

    @property
    def unused_names(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors in the checkpoint that the model does not use."""
        return tuple(f"model.layers.{self.num_layers + i}." for i in range(self.mtp_layers))

    @property
    def stacked_experts(self) -> Stacked:
        """Layout of stacked experts in the checkpoint, as ``MoESpec.stacked``."""
        return "rows" if self.moe is None else self.moe.stacked

    @property
    def rotary_dim(self) -> int:
        """Values of a head to which rotary embeddings are applied."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def check_tp(self, size: int, mlp_size: int | None = None) -> None:
        """Raises ConfigError where ``size`` ranks cannot split attention evenly, or ``mlp_size`` ranks the MLPs."""
        mlp_size = mlp_size or size
        width = self.intermediate_size if self.num_dense_layers else 0
        if self.num_heads % size or width % mlp_size:
            raise ConfigError(f"--tp-size {size} must divide the model's {self.num_heads} attention heads and its "
                              f"intermediate size {self.intermediate_size}.")
        if self.moe is not None and self.moe.shared_size % mlp_size:
            raise ConfigError(f"--tp-size {size} must divide the shared expert's intermediate size "
                              f"{self.moe.shared_size}.")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ConfigError(f"--tp-size {size} must divide the model's {self.num_kv_heads} KV heads or be a "
                              f"multiple of them.")

    @property
    def num_dense_layers(self) -> int:
        """Number of layers whose MLP is no mixture of experts."""
        return self.num_layers - (len(self.moe.layers) if self.moe is not None else 0)

    def local_kv_heads(self, tp_size: int) -> int:
        """Returns the KV heads of one rank; with more ranks than KV heads each head is replicated."""
        return max(1, self.num_kv_heads // tp_size)


def load_model_spec(args: ModelArgs) -> ModelSpec:
    """Reads ``config.json`` and ``generation_config.json``; raises ConfigError, naming what is unsupported."""
    folder = resolve_metadata(args)
    config = read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face checkpoint.")
    generation = read_json(folder / "generation_config.json")
    for name in _COUNTS:
        if name in config and (type(config[name]) is not int or config[name] < 1):
            raise ConfigError(f"{folder}/config.json says {name} {config[name]!r}: it must be an integer of 1 or more.")
    try:
        return _spec_from(config, generation, args)
    except KeyError as error:
        raise ConfigError(f"{folder}/config.json lacks {error.args[0]!r}.") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder}/config.json has a value of the wrong type ({error}).") from None


def _spec_from(given: dict[str, Any], generation: dict[str, Any] | None, args: ModelArgs) -> ModelSpec:
    """``given`` and ``generation`` as the files have them, None without the second."""
    architecture = _check_supported(given)
    family, head = ARCHITECTURES[architecture], _head(architecture, args)
    config = with_defaults(given, next(architecture.removesuffix(end) for end in _HEADS if architecture.endswith(end)))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta, scaling = _rope(config)
    mla = latent_attention(config, scaling) if family.latent else None
    if mla is not None:
        kv_heads, head_dim = 1, mla.qk_dim
    longest = _longest_context(config["max_position_embeddings"], scaling)
    context_length = args.context_length or longest
    if not 0 < context_length <= longest:
        raise ConfigError(f"--context-length {context_length} must be between 1 and the model's {longest}.")
    eos_ids = _eos_token_ids(config, {}) if generation is None else _eos_token_ids(given, generation)
    has = range(config["vocab_size"])
    attention_bias = family.biases_in_config and bool(config["attention_bias"])
    return ModelSpec(
        architecture=architecture, hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"],
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        intermediate_size=config["intermediate_size"], vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"], rms_norm_eps=config["rms_norm_eps"],
        rope_theta=theta, rope_scaling=scaling, tie_word_embeddings=bool(config["tie_word_embeddings"]),
        attention_bias=config.get("qkv_bias", True) if family.qkv_bias else attention_bias, o_bias=attention_bias,
        mlp_bias=family.biases_in_config and bool(config.get("mlp_bias", False)), qk_norm=family.qk_norm,
        dtype=_dtype(config), eos_token_ids=tuple(id for id in eos_ids if id in has),
        context_length=context_length, head=head, num_labels=_num_labels(config) if head == "classifier" else 0,
        moe=family.experts(config) if family.experts else None,
        quantization=choose_quantization(config, args.quantization), mla=mla,
        mtp_layers=(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0) if mla else 0,
        windows=family.windows(config), sinks=family.sinks,
        dropped_eos_ids=tuple(id for id in eos_ids if id not in has),
    )


def _head(architecture: str, args: ModelArgs) -> Head:
    """Returns the architecture's head; raises ConfigError where the server is to generate and the model cannot."""
    head = next(head for suffix, head in _HEADS.items() if architecture.endswith(suffix))
    if head != "lm" and not args.is_embedding:
        raise ConfigError(f"{architecture} does not generate text: serve it with --is-embedding.")
    return head


def _num_labels(config: dict[str, Any]) -> int:
    """Counts labels as transformers does, which writes the count only where it differs from the labels' names."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))


def _check_supported(config: dict[str, Any]) -> str:
    named = config.get("architectures") or ["none"]
    found: str | None = next((name for name in named if name in ARCHITECTURES), None)
    if found is None:
        raise ConfigError(f"Architecture {named[0]} is not supported: use a checkpoint of "
                          f"{', '.join(name for name in ARCHITECTURES if name.endswith('ForCausalLM'))}.")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"Activation {act!r} is not supported: use a checkpoint with hidden_act 'silu'.")
    return found


def _dtype(config: dict[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"Checkpoint dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}.")
    return dtype


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Returns ``(theta, scaling)``; older checkpoints write ``rope_theta`` next to ``rope_scaling``, newer ones one
    dict."""
    merged = dict(config.get("rope_scaling") or {}) or dict(config.get("rope_parameters") or {})
    theta = float(merged.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = merged.pop("rope_type", None) or merged.get("type") or "default"
    merged.pop("type", None)
    if merged.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("Partial rotary embeddings are not supported.")
    if kind not in ROPE_TYPES:
        raise ConfigError(f"Rope scaling {kind!r} is not supported: use a checkpoint with {', '.join(ROPE_TYPES)}.")
    if kind == "default":
        return theta, None
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings")
        if original is not None:
            merged["original_max_position_embeddings"] = original
        merged.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if merged.get("factor") is None:
        if kind != "yarn":
            raise KeyError(f"rope_scaling.factor of {kind}")
        merged["factor"] = config["max_position_embeddings"] / merged["original_max_position_embeddings"]
    return theta, {"rope_type": kind, **merged}


def _longest_context(max_positions: int, scaling: Mapping[str, Any] | None) -> int:
    """Returns the longest context. Llama 3's ``max_position_embeddings`` includes the scaling, and yarn's may."""
    kind = scaling["rope_type"] if scaling else "default"
    if scaling and kind in ("linear", "dynamic"):
        return int(max_positions * scaling["factor"])
    if scaling and kind == "yarn":
        return max(max_positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    return max_positions


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    eos_ids: list[int] = []
    for source in (generation, config):
        ids = source.get("eos_token_id")
        eos_ids.extend(id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int))
    return tuple(dict.fromkeys(eos_ids))
