"""BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116): encoders, whose tokens attend
to all of their sequence. They embed, classify and rerank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..api.errors import ConfigError
from ..config.checkpoint import read_json, resolve_metadata
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.server import ModelArgs
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    import torch

    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.causal_lm import CausalLM


@dataclass(frozen=True)
class EncoderSpec:
    """Facts of an encoder. The row of position p in the table of ``positions`` rows is p + ``first_position``. Tokens
    after the first ``separator_id`` of a sequence are of the second of ``token_types``. A classifier's head is
    ``head_layers``, with tanh between them, of the first token's state."""

    norm_eps: float
    activation: str
    positions: int
    first_position: int
    token_types: int
    separator_id: int | None
    head_layers: tuple[str, ...]


def read_bert(config: ModelConfig) -> ModelSpec:
    types = config.values["type_vocab_size"]
    return _read(config, 0, _separator(config.args) if types > 1 else None, ("pooler.dense", "classifier"))


def read_roberta(config: ModelConfig) -> ModelSpec:
    """Reads a configuration whose positions begin after the padding token's."""
    return _read(config, config.values["pad_token_id"] + 1, None, ("classifier.dense", "classifier.out_proj"))


def _read(config: ModelConfig, first_position: int, separator_id: int | None,
          head_layers: tuple[str, ...]) -> ModelSpec:
    values = config.values
    kind = values.get("position_embedding_type") or "absolute"
    if kind != "absolute" or values.get("is_decoder"):
        what = "as a decoder" if values.get("is_decoder") else f"with position embeddings of type {kind!r}"
        raise ConfigError(f"{config.architecture} {what} is not supported: use an encoder with absolute positions.")
    positions = values["max_position_embeddings"]
    own = EncoderSpec(values["layer_norm_eps"], values["hidden_act"], positions, first_position,
                      values["type_vocab_size"], separator_id, head_layers)
    return config.spec(positions - first_position, own)


def _separator(args: ModelArgs) -> int | None:
    """Returns the id of the token [SEP] by the checkpoint's tokenizer; None without one."""
    folder = resolve_metadata(args)
    added: list[dict[str, Any]] = (read_json(folder / "tokenizer.json") or {}).get("added_tokens") or []
    found = [token["id"] for token in added if token.get("content") == "[SEP]"]
    vocabulary = folder / "vocab.txt"
    if not found and vocabulary.exists():
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        found = [lines.index("[SEP]")] if "[SEP]" in lines else []
    return found[0] if found else None


def build(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    from .encoder.model import EncoderModel

    # It has what a rank calls that generates nothing.
    return cast("CausalLM", EncoderModel(spec, spec.family, parallel, dtype, device))


_PREFIXES = ("bert.", "roberta.")
_UNUSED = ("cls.", "lm_head.", "embeddings.position_ids")
"""Of heads that predict tokens, and of old versions of transformers."""


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Returns what names tensors as the model does: without a prefix, and norms' as transformers' for long."""
    unused = _UNUSED if spec.head == "classifier" else (*_UNUSED, "pooler.")

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not name.startswith(unused):
            yield name, tensor

    return parts


_DEFAULTS = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
             "layer_norm_eps": 1e-12, "pad_token_id": 0, "tie_word_embeddings": True}
_ROBERTA = {**_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

MODELS.register("BertModel", "BertForSequenceClassification")(
    ModelFamily(read_bert, build=build, defaults=_DEFAULTS, tensor_parts_of=tensor_parts_of, encoder=True,
                title="BERT", notes="encoders: embeddings, classifiers, cross-encoders"))
MODELS.register("RobertaModel", "RobertaForSequenceClassification", "XLMRobertaModel",
                "XLMRobertaForSequenceClassification", "CamembertModel", "CamembertForSequenceClassification")(
    ModelFamily(read_roberta, build=build, defaults=_ROBERTA, tensor_parts_of=tensor_parts_of, encoder=True,
                title="RoBERTa, XLM-RoBERTa, CamemBERT", notes="encoders: embeddings, classifiers, cross-encoders"))
