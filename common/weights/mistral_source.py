"""Weights from Mistral's own checkpoints, by Hugging Face's names.

Rows of wq and wk have the two values of a rotation side by side, and not a head's first halves before its second ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..config.checkpoint import read_config, resolve_checkpoint
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from ..config.weight_files import is_mistral
from .interleaved_rotary import ReorderedRows, half_order
from .lazy import LazyTensor
from .safetensors_source import SafetensorsSource
from .slots import Slot
from .source import SourceTensor

_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
          "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
          "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
          "feed_forward.w3": "mlp.up_proj", "gate": "block_sparse_moe.gate",
          "feed_forward.gate": "block_sparse_moe.gate"}
_NAME = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"(?:feed_forward\.)?experts\.(\d+)\.(w[123])")


@LOAD_FORMATS.register("mistral")
class MistralSource:
    """The ``consolidated*.safetensors`` of the checkpoint that ``args`` name."""

    reads_checkpoint = True

    def __init__(self, args: ModelArgs):
        self._source = SafetensorsSource(args)
        self.name = self._source.name
        values = read_config(args, resolve_checkpoint(args)) or {}
        heads = values.get("num_attention_heads", 1)
        self._head_dim = values.get("head_dim") or values.get("hidden_size", heads) // heads

    @staticmethod
    def finds(args: ModelArgs, folder: Path) -> bool:
        return is_mistral(folder)

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for name, tensor, file in self._source.tensors(slots):
            yield SourceTensor(name_of(name), self._ordered(name, tensor), file)

    def _ordered(self, name: str, tensor: LazyTensor) -> LazyTensor:
        if not re.search(r"\.w[qk]\.", name):
            return tensor
        return ReorderedRows(tensor, half_order(self._head_dim, self._head_dim))

    def find(self, name: str) -> LazyTensor:
        for found, tensor, _ in self.tensors(()):
            if found == name:
                return tensor
        return self._source.find(name)  # which raises

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        return self._source.identity(lambda name: is_optional(name_of(name)))


def name_of(name: str) -> str:
    """Returns Hugging Face's name of a tensor; one that has none is left as it is."""
    if match := _NAME.fullmatch(name):
        layer, tensor = match.groups()
        if expert := _EXPERT.fullmatch(tensor):
            return f"model.layers.{layer}.block_sparse_moe.experts.{expert[1]}.{expert[2]}.weight"
        return f"model.layers.{layer}.{_LAYER.get(tensor, tensor)}.weight"
    top = name.removesuffix(".weight")
    return f"{_TOP[top]}.weight" if top in _TOP else name
