"""Small checkpoints in int8, written plainly, and the layers that compute what they are to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from baton.tests.helpers.fp8_checkpoints import state
from baton.tests.helpers.small_models import save_model

STATIC, ZERO = 0.06, -9


def stated(kind: str) -> dict[str, Any]:
    static, symmetric = "static" in kind, "asymmetric" not in kind
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
                    "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor" if static else "token",
                                          "dynamic": not static, "symmetric": symmetric}}}}


class PlainInt8(torch.nn.Module):
    """A linear layer with its weight and its inputs rounded to int8, in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: str):
        super().__init__()
        self.bias, self.kind = bias, kind
        self.scale = (weight.abs().amax(1) / 127).bfloat16().float()
        self.q = (weight / self.scale[:, None]).round().clamp(-128, 127).to(torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, zero = torch.tensor(STATIC), torch.tensor(float(ZERO) if "asymmetric" in self.kind else 0.0)
        if "static" not in self.kind:
            low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
            scale = (high - low) / 255 if "asymmetric" in self.kind else x.abs().amax(-1, keepdim=True) / 127
            zero = -128 - (low / scale).round() if "asymmetric" in self.kind else zero
        q = ((x / scale).round() + zero).clamp(-128, 127)
        return linear((q - zero) * scale, self.q.float() * self.scale[:, None], self.bias)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        found = {f"{name}.weight": self.q, f"{name}.weight_scale": self.scale[:, None].bfloat16()}
        if "static" in self.kind:
            found[f"{name}.input_scale"] = torch.tensor([STATIC])
            if "asymmetric" in self.kind:
                found[f"{name}.input_zero_point"] = torch.tensor([ZERO], dtype=torch.int8)
        return found


def save_int8(folder: Path, kind: str, config: dict[str, Any] | None, family: str = "Qwen3") -> Any:
    """A checkpoint in ``folder`` with ``quantization_config`` ``config``; returns transformers' model, its linear
    layers replaced by plain ones."""
    model = save_model(folder, family)
    tensors = load_file(folder / "model.safetensors")
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            plain = PlainInt8(module.weight.detach(), module.bias, kind)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
            tensors.update(plain.tensors(name))
    save_file(tensors, folder / "model.safetensors")
    state(folder, config)
    return model
