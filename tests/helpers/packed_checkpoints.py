"""Small checkpoints with weights in 4 or 8 bits, packed as AutoAWQ, GPTQModel, AutoRound and compressed-tensors pack
them, and beside each the checkpoint of the same weights in floating point."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of eight that AutoAWQ puts into a word's nibbles, the lowest first."""
_PROJECTION = re.compile(r".*(_proj(_with_mqa)?|\.w[123])\.weight")


@dataclass
class Quantized:
    """A weight [out, in] as integers: ``values``, ``scales`` and ``zeros`` [out, groups], and each input's group."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_index: torch.Tensor
    bits: int

    @property
    def weight(self) -> torch.Tensor:
        """The floating-point weight."""
        groups = self.group_index.long()
        return (self.values.float() - self.zeros.float()[:, groups]) * self.scales.float()[:, groups]


def quantize(weight: torch.Tensor, bits: int, group: int, symmetric: bool, act_order: bool, seed: int) -> Quantized:
    """Rounds each group of inputs to the nearest integers, scales to float16."""
    out, width = weight.shape
    group = width if group == -1 else group
    index = torch.arange(width) // group
    if act_order:
        index = index[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    most = 2**bits - 1
    values, scales, zeros = torch.zeros(out, width), [], []
    for number in range(width // group):
        part = weight[:, index == number].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale = (part.abs().amax(1) / (most // 2)).half().float()
            zero = torch.full_like(scale, (most + 1) // 2)
        else:
            scale = ((high - low) / most).half().float()
            zero = (-low / scale).round().clamp(1, most)  # GPTQ's first version cannot store a zero of 0
        values[:, index == number] = (part / scale[:, None] + zero[:, None]).round().clamp(0, most)
        scales.append(scale)
        zeros.append(zero)
    return Quantized(values.int(), torch.stack(scales, 1).half(), torch.stack(zeros, 1).int(), index.int(), bits)


def pack(values: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Packs the integers along ``dim`` into words of 32 bits; the last word is filled with zeros."""
    per = 32 // bits
    moved = values.movedim(dim, -1).long()
    moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % per)).unflatten(-1, (-1, per))
    places = order if bits == 4 else range(per)
    words = sum(moved[..., column] << (bits * place) for place, column in enumerate(places))
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def as_awq(q: Quantized) -> dict[str, torch.Tensor]:
    return {"qweight": pack(q.values.T, 4, 1, _AWQ_ORDER), "qzeros": pack(q.zeros.T, 4, 1, _AWQ_ORDER),
            "scales": q.scales.T.contiguous()}


def as_gptq(q: Quantized, offset: int = 1) -> dict[str, torch.Tensor]:
    """With the biases of 0 that AutoGPTQ writes for layers without one."""
    return {"qweight": pack(q.values.T, q.bits, 0), "qzeros": pack(q.zeros.T - offset, q.bits, 1),
            "scales": q.scales.T.contiguous(), "g_idx": q.group_index.contiguous()}


def as_compressed(q: Quantized, symmetric: bool, act_order: bool) -> dict[str, torch.Tensor]:
    found = {"weight_packed": pack(q.values, q.bits, 1), "weight_scale": q.scales.clone(),
             "weight_shape": torch.tensor(q.values.shape)}
    if not symmetric:
        found["weight_zero_point"] = pack(q.zeros, q.bits, 0)
    return found | ({"weight_g_idx": q.group_index.clone()} if act_order else {})


@dataclass
class Form:
    """A form of checkpoint: what its configuration states, and the packing."""

    stated: dict[str, Any]
    write: Callable[[Quantized], dict[str, torch.Tensor]]
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    act_order: bool = False
    ignored: tuple[str, ...] = ()


def _gptq(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, version: int = 1,
          **stated: Any) -> Form:
    return Form({"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order,
                 "checkpoint_format": "gptq" if version == 1 else "gptq_v2", "lm_head": False, **stated},
                lambda q: as_gptq(q, offset=2 - version), bits, group, symmetric, act_order)


def _compressed(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False) -> Form:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": "group" if act_order else None,
               "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group}
    return Form({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                 "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}},
                lambda q: as_compressed(q, symmetric, act_order), bits, group, symmetric, act_order)


def _auto_round(packing: str, write: Callable[[Quantized], dict[str, torch.Tensor]], symmetric: bool) -> Form:
    return Form({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": symmetric, "data_type": "int",
                 "packing_format": f"auto_round:{packing}",
                 "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}},
                write, symmetric=symmetric, ignored=("layers.0.mlp.up_proj",))


FORMS: dict[str, Form] = {
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
                 "modules_to_not_convert": ["self_attn.o_proj"]}, as_awq, symmetric=False, ignored=("o_proj",)),
    "gptq": _gptq(),
    "gptq asymmetric v2": _gptq(symmetric=False, version=2, group=64),
    "gptq act-order": _gptq(symmetric=False, act_order=True),
    "gptq 8 bits, whole columns": _gptq(bits=8, group=-1, act_order=True),
    "gptq 8 bits, act-order": _gptq(bits=8, act_order=True, symmetric=False),
    "compressed-tensors": _compressed(),
    "compressed-tensors asymmetric": _compressed(symmetric=False, group=64),
    "compressed-tensors 8 bits": _compressed(bits=8, group=-1),
    "compressed-tensors act-order": _compressed(act_order=True, symmetric=False),
    "auto-round": _auto_round("auto_gptq", as_gptq, symmetric=False),
    "auto-round as awq": _auto_round("auto_awq", as_awq, symmetric=False),
}


def save_packed(folder: Path, form: Form, save: Callable[[Path], object],
                forms: Mapping[str, Form] | None = None) -> Path:
    """Saves a checkpoint in ``form`` to ``folder``, of the model that ``save`` saves, and returns the folder of the one
    in floating point. Layers whose names hold a key of ``forms`` are in that form."""
    dense = folder.with_name(f"{folder.name}-dense")
    save(dense)
    tensors = load_file(dense / "model.safetensors")
    packed = dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        own = next((other for part, other in (forms or {}).items() if part in name), form)
        if not _PROJECTION.fullmatch(name) or any(part in name for part in own.ignored):
            continue
        q = quantize(tensors[name], own.bits, own.group, own.symmetric, own.act_order, seed)
        tensors[name] = q.weight.to(tensors[name].dtype)
        layer = name.removesuffix(".weight")
        del packed[name]
        packed |= {f"{layer}.{key}": value for key, value in own.write(q).items()}
        if form.stated["quant_method"] == "gptq" and f"{layer}.bias" not in packed:
            packed[f"{layer}.bias"] = torch.zeros(len(q.values), dtype=torch.float16)
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, dense / "model.safetensors")
    save_file(packed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.stated}))
    return dense
