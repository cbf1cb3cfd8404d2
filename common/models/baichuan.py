"""Baichuan 1 and 2 of 7B, and XVERSE: Llama, in Baichuan with queries, keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from . import llama
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts

_VOCAB_OF_2 = 125696
"""Baichuan 2's vocabulary, by which its own code knows it."""


def read(config: ModelConfig) -> ModelSpec:
    if "max_position_embeddings" not in config.values:
        raise ConfigError("Baichuan models of 13B attend with linear biases (ALiBi), which are not supported: use one "
                          "of 7B.")
    return llama.read(config)


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Splits queries, keys and values. Baichuan 2 norms the rows of its head, once for all here."""
    from ..weights.fused_tensors import NormalizedRows, qkv_rows, split_names

    split = split_names({"W_pack": qkv_rows(spec)})
    if spec.vocab_size != _VOCAB_OF_2:
        return split

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        return [(name, NormalizedRows(tensor))] if name == "lm_head.weight" else split(name, tensor)

    return parts


_BAICHUAN = {**COMMON, "vocab_size": _VOCAB_OF_2, "intermediate_size": 11008, "attention_bias": False,
             "mlp_bias": False, "eos_token_id": 2}
_XVERSE = {**_BAICHUAN, "vocab_size": 100278, "max_position_embeddings": 8192, "eos_token_id": 3}

MODELS.register("BaichuanForCausalLM", "BaiChuanForCausalLM", "BaichuanModel")(
    ModelFamily(read, llama.blocks, _BAICHUAN, tensor_parts_of=tensor_parts_of, title="Baichuan 1, 2",
                notes="7B; the tokenizer needs `--trust-remote-code`"))
MODELS.register("XverseForCausalLM", "XverseModel")(
    ModelFamily(llama.read, llama.blocks, _XVERSE, title="XVERSE", notes="dense"))
