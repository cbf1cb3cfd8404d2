"""GGUF files of small models, written by the gguf package, and blocks with random contents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch

from baton.kernels.gguf_blocks import BLOCKS
from baton.kernels.reference import dequantize_gguf

_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82),
           "Q3_K": (108,)}
SIZES = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}
"""Widths of whole blocks, also for each of two ranks."""


def random_blocks(kind: str, rows: int, width: int, seed: int = 0, deviation: float = 0.5) -> torch.Tensor:
    """Returns ``[rows, bytes]`` uint8: any bits, but for scales in float16 by which values have this deviation."""
    generator = torch.Generator().manual_seed(seed)
    block = BLOCKS[kind]
    blocks = torch.randint(0, 256, (rows * width // block.values, block.num_bytes), generator=generator,
                           dtype=torch.uint8)
    scales = {start: torch.rand(len(blocks), 1, generator=generator) * 0.01 + 0.005
              for start in _HALVES.get(kind, (0,))}


    def put_scales(factor: float) -> None:
        for start, scale in scales.items():
            # What is added to values, in these types, is to make up for their being positive.
            own = -8 * factor if kind in ("Q4_1", "Q5_1") and start == 2 else factor
            blocks[:, start:start + 2] = (own * scale).half().view(torch.uint8)

    put_scales(1.0)
    put_scales(deviation / float(dequantize_gguf(blocks, kind).std()))
    return blocks.view(rows, -1)


def save_gguf(file: Path, model: Any, architecture: str, kinds: Callable[[str], str], *,
              metadata: Callable[[gguf.GGUFWriter], None] | None = None) -> None:
    """Saves transformers' ``model`` as a file of llama.cpp's ``architecture``. ``kinds`` says by Hugging Face's names
    of which type tensors are; quantized ones are random, and become the model's, too."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    writer.add_eos_token_id(7)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    is_gemma = architecture.startswith("gemma")
    if is_gemma:
        writer.add_sliding_window(config.sliding_window)
        for cap, add in ((config.attn_logit_softcapping, writer.add_attn_logit_softcapping),
                         (config.final_logit_softcapping, writer.add_final_logit_softcapping)):
            if cap:
                add(cap)
    if metadata is not None:
        metadata(writer)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for index, (name, value) in enumerate(model.state_dict().items()):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        pairs = heads if architecture == "llama" else None
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            parts = value.chunk(2, 1) if name.endswith("gate_up_proj") else (value,)
            for part, stack in zip(parts, ("gate", "up") if len(parts) == 2 else ("down",)):
                _add(writer, f"blk.{name.split('.')[2]}.ffn_{stack}_exps.weight", part, kinds(name), None, seed=index)
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        _add(writer, own, value + 1 if is_gemma and "norm" in name else value, kinds(name), pairs, seed=index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: torch.Tensor, kind: str, pairs: int | None, seed: int) -> None:
    """Adds a tensor; with ``pairs`` heads the two values of a rotation stand side by side."""
    if kind in BLOCKS:
        packed = random_blocks(kind, value[..., 0].numel(), value.shape[-1], seed=seed, deviation=0.05)
        stored = dequantize_gguf(packed, kind).view(value.shape)
        packed = packed.view(*value.shape[:-1], -1)
        if pairs:
            stored = stored.view(pairs, -1, 2, stored.shape[1]).transpose(1, 2).reshape(stored.shape)
        value.copy_(stored)
        writer.add_tensor(name, packed.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
        return
    if pairs:
        value = value.view(pairs, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    writer.add_tensor(name, value.to({"F16": torch.float16, "F32": torch.float32}[kind]).numpy())
