"""GGUF: a model's description is the metadata of its file, and what its tensors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....kernels.gguf_blocks import BLOCKS
from ...api.errors import ConfigError
from ..description import DESCRIPTIONS
from ..gguf_families import GgufFamily, family_of
from ..gguf_file import GgufFile, find_gguf, read_gguf
from ..server import ModelArgs
from ..weight_files import has_safetensors, pickled_files

_NEEDED = {"hidden_size": "embedding_length", "num_hidden_layers": "block_count",
           "num_attention_heads": "attention.head_count", "max_position_embeddings": "context_length",
           "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_OPTIONAL = {"num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
             "rope_theta": "rope.freq_base", "intermediate_size": "feed_forward_length"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def chosen_gguf(args: ModelArgs, path: Path) -> Path | None:
    """Returns the GGUF file that a checkpoint's weights are read from; None where others are. Raises ConfigError where
    a folder has several."""
    if path.suffix == ".gguf" or args.load_format == "gguf":
        return find_gguf(path)
    others = has_safetensors(path) or bool(pickled_files(path))
    return None if others or args.load_format not in ("auto", "layered") else find_gguf(path)


@DESCRIPTIONS.register("gguf")
def describe_gguf(args: ModelArgs, path: Path) -> dict[str, Any] | None:
    """Returns the values of config.json that follow from a GGUF file; None where the weights are not in one."""
    found = chosen_gguf(args, path)
    if found is None:
        return None
    file = read_gguf(found)
    family = family_of(file)
    values = {name: _one(found, file, key) for name, key in _NEEDED.items()}
    for name, key in _OPTIONAL.items():
        if (value := file.get(key)) is not None:
            values[name] = value
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{found} lacks token_embd.weight: it is no language model.")
    ends = [file.metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    return {**values, "architectures": [family.architecture], "model_type": family.model_type, "hidden_act": "silu",
            "vocab_size": file.tensors["token_embd.weight"].shape[0], "torch_dtype": "bfloat16",
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
            **_rope_scaling(file), **family.values(file), **_quantization(file, family)}


def _one(path: Path, file: GgufFile, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise ConfigError(f"{path} lacks {file.architecture}.{key}.")
    return value


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    kind, factor = file.get("rope.scaling.type", "none"), file.get("rope.scaling.factor")
    if kind == "none" or not factor:
        return {}
    original = file.get("rope.scaling.original_context_length")
    return {"rope_scaling": {"rope_type": kind, "factor": factor,
                             **({"original_max_position_embeddings": original} if original else {})}}


def _quantization(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """Returns which linear layers are in quantized blocks, and in which; nothing where none is. Embeddings, the output
    head and stacks of experts are dequantized while they are loaded."""
    kinds = {}
    for name, tensor in file.tensors.items():
        own = family.name_of(name)
        if tensor.kind in BLOCKS and len(tensor.shape) == 2 and own is not None and name.startswith("blk."):
            kinds[own.removesuffix(".weight")] = tensor.kind
    return {"quantization_config": {"quant_method": "gguf", "kinds": kinds}} if kinds else {}
