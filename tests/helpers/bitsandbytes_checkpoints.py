"""Small checkpoints as bitsandbytes writes them, packed plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from baton.kernels.reference import TABLES
from baton.tests.helpers.fp8_checkpoints import state
from baton.tests.helpers.small_models import save_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def save_bitsandbytes(folder: Path, kind: str, nested: bool = False) -> Any:
    """A checkpoint in ``folder``; returns transformers' model with the weights that it means."""
    model = save_model(folder, "Qwen3", **SIZES)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        made, dense = (pack_int8 if kind == "int8" else pack4)(name, tensors.pop(name), kind, nested)
        tensors |= made
        model.get_parameter(name).data.copy_(dense)
    save_file(tensors, folder / "model.safetensors")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    state(folder, {"quant_method": "bitsandbytes", **({"load_in_8bit": True} if kind == "int8" else four)})
    return model


def pack_int8(name: str, weight: torch.Tensor, kind: str, nested: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    largest = weight.abs().amax(1)
    q = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {name: q, f"{name.removesuffix('weight')}SCB": largest}, q.float() * largest[:, None] / 127


def pack4(name: str, weight: torch.Tensor, kind: str, nested: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    table = torch.tensor(TABLES[kind])
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    facts = {"quant_type": kind, "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
    parts = {"quant_map": table}
    if nested:
        codes, offset, size = torch.linspace(-1, 1, 256), float(absmax.mean()), 16
        groups = (absmax - offset).split(size)
        largest = torch.stack([group.abs().max() for group in groups])
        stored = torch.cat([(group / most)[:, None].sub(codes).abs().argmin(1)
                            for group, most in zip(groups, largest)]).to(torch.uint8)
        absmax = codes[stored.int()] * largest.repeat_interleave(size)[:len(stored)] + offset
        parts |= {"absmax": stored, "nested_absmax": largest, "nested_quant_map": codes}
        facts |= {"nested_blocksize": size, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        parts["absmax"] = absmax
    q = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1).to(torch.uint8)
    pairs = q.flatten().view(-1, 2)
    found = {f"{name}.{part}": value for part, value in parts.items()}
    found[name] = (pairs[:, :1] << 4) | pairs[:, 1:]
    found[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(facts).encode()), dtype=torch.uint8)
    return found, (table[q.int()] * absmax[:, None]).view(weight.shape)
