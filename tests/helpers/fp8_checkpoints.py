"""Small models in float8 in every form of checkpoint, and what they are to compute, written plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from baton.tests.helpers.small_models import save_model

FLOAT8 = torch.float8_e4m3fn
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 4,
         "head_dim": 64}
STATIC = 0.03  # of activations: normed ones reach about 5, and 448 * 0.03 = 13

FINEGRAINED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PACKED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {
    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}}}
FORMS: dict[str, dict[str, Any]] = {
    "blocks": FINEGRAINED,
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["model.layers.0.mlp"]},
    "static of transformers": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "channel": PACKED,
}


class PlainLinear(torch.nn.Module):
    """A linear layer with its weight and its inputs rounded to float8, in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, form: str):
        super().__init__()
        self.bias, self.form = bias, form
        rows = weight.float().split(128) if form == "blocks" else weight.float().split(
            1 if form == "channel" else len(weight))
        width = 128 if form == "blocks" else weight.shape[1]
        tiles = [[rounded(tile) for tile in row.split(width, 1)] for row in rows]
        self.q = torch.cat([torch.cat([q for q, _ in row], 1) for row in tiles])
        self.scale = torch.tensor([[scale for _, scale in row] for row in tiles])
        self.weight = torch.cat([torch.cat([q.float() * scale for q, scale in row], 1) for row in tiles])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form.startswith("static"):
            x = (x / STATIC).clamp(-448, 448).to(FLOAT8).float() * STATIC
        else:
            width = 128 if self.form == "blocks" else x.shape[-1]
            x = torch.cat([self.turned(part) for part in x.split(width, -1)], -1)
        return linear(x, self.weight, self.bias)

    @staticmethod
    def turned(part: torch.Tensor) -> torch.Tensor:
        scale = part.abs().amax(-1, keepdim=True) / 448
        return (part / scale).to(FLOAT8).float() * scale

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """As the checkpoint of the form holds them."""
        found = {f"{name}.weight": self.q}
        if self.form == "blocks":
            return {**found, f"{name}.weight_scale_inv": self.scale}
        if self.form == "channel":
            return {**found, f"{name}.weight_scale": self.scale.bfloat16().float()}
        if self.form == "static of transformers":
            return {**found, f"{name}.weight_scale_inv": self.scale[0, 0].clone(),
                    f"{name}.activation_scale": torch.tensor(STATIC)}
        found[f"{name}.weight_scale"] = self.scale[0].clone()
        return {**found, f"{name}.input_scale": torch.tensor(STATIC)} if self.form == "static" else found


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, float]:
    # Scales that bfloat16 has too, which compressed-tensors writes them in.
    scale = float((weight.abs().max() / 448 * 1.01).bfloat16())
    return (weight / scale).to(FLOAT8), scale


def save_float8(folder: Path, form: str, family: str = "Qwen3", **changes: Any) -> Any:
    """A checkpoint of ``form`` in ``folder``; returns transformers' model, its linear layers replaced by plain ones."""
    model = save_model(folder, family, **{**SIZES, **changes})
    tensors = load_file(folder / "model.safetensors")
    stated = FORMS[form]
    for name, module in list(model.named_modules()):
        kept = name == "lm_head" or any(name.startswith(layer) for layer in stated.get("ignored_layers", ()))
        if isinstance(module, torch.nn.Linear) and not kept:
            plain = PlainLinear(module.weight.detach(), module.bias, form)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
            tensors.update(plain.tensors(name))
    save_file(tensors, folder / "model.safetensors")
    state(folder, stated)
    return model


def state(folder: Path, stated: dict[str, Any] | None) -> None:
    """Write ``stated`` as the ``quantization_config`` of config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config | ({"quantization_config": stated} if stated else {})))
