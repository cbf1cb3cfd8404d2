"""Small random draft models in the layouts of their checkpoints, and what they compute, in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from baton.tests.helpers.small_models import save_model

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH, VOCAB, EPS, THETA = 4, 2, 12, 48, 88, 131, 1e-5, 5000.0
CONFIG = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS,
          "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "rms_norm_eps": EPS,
          "rope_theta": THETA, "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32"}

Weights = dict[str, torch.Tensor]
Reference = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Computes a layer of all rows ``(layer, hidden [n, hidden], ids [n])``: the head's logits, and the next states."""


def write(folder: Path, architecture: str, weights: Weights, *, pickled: bool = False, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture], **changes}))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")


def layer_weights(prefix: str, inputs: int = HIDDEN, norms: tuple[str, ...] = ("input_layernorm",)) -> Weights:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"self_attn.q_proj": (q, inputs), "self_attn.k_proj": (kv, inputs), "self_attn.v_proj": (kv, inputs),
              "self_attn.o_proj": (HIDDEN, q), "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN),
              "mlp.down_proj": (HIDDEN, WIDTH)}
    weights = {f"{prefix}{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    return weights | {f"{prefix}{name}.weight": torch.rand(HIDDEN) + 0.5
                      for name in (*norms, "post_attention_layernorm")}


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Heads [n, heads, D] of positions 0 to n - 1."""
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def block(weights: Weights, prefix: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """A layer whose attention reads ``x`` [n, inputs]: its result with the residual."""
    def project(name: str, heads: int) -> torch.Tensor:
        return linear(x, weights[f"{prefix}self_attn.{name}.weight"]).view(len(x), heads, HEAD_DIM)

    q, k, v = rotated(project("q_proj", HEADS)), rotated(project("k_proj", KV_HEADS)), project("v_proj", KV_HEADS)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    heads = scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), is_causal=True)
    residual = residual + linear(heads.transpose(0, 1).flatten(1), weights[f"{prefix}self_attn.o_proj.weight"])
    normed = norm(residual, weights[f"{prefix}post_attention_layernorm.weight"])
    gated = silu(linear(normed, weights[f"{prefix}mlp.gate_proj.weight"])) * linear(
        normed, weights[f"{prefix}mlp.up_proj.weight"])
    return residual + linear(gated, weights[f"{prefix}mlp.down_proj.weight"])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], weight, EPS)


def save_eagle3(folder: Path, target: Any, *, prefix: str = "midlayer.", draft_vocab: int | None = 40,
                own_embed: bool = False, architecture: str = "LlamaForCausalLMEagle3", pickled: bool = False,
                norms: str = "", norm_before_residual: bool = False, bias: bool = False,
                **changes: Any) -> tuple[Any, Reference, list[int] | None]:
    """Returns what turns features into hidden states, the layer, and the ids of the draft's vocabulary."""
    torch.manual_seed(1)
    weights = layer_weights(prefix, 2 * HIDDEN, ("input_layernorm", "hidden_norm"))
    weights |= {"fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) * 0.1, "norm.weight": torch.rand(HIDDEN) + 0.5}
    ids = None
    if draft_vocab is not None:
        ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
        weights["d2t"] = ids - torch.arange(draft_vocab)
        weights["t2d"] = torch.isin(torch.arange(VOCAB), ids)
        weights["lm_head.weight"] = torch.randn(draft_vocab, HIDDEN) * 0.2
    if own_embed:
        weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    if bias:
        weights["fc.bias"] = torch.randn(HIDDEN)
    if norms == "input_norm":
        weights["input_norm.weight"] = torch.rand(3 * HIDDEN) + 0.5
    elif norms == "fc_norm":
        weights |= {f"fc_norm.{index}.weight": torch.rand(HIDDEN) + 0.5 for index in range(3)}
    write(folder, architecture, weights, draft_vocab_size=draft_vocab, pickled=pickled,
          norm_before_residual=norm_before_residual, **changes)
    embed = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    head = weights.get("lm_head.weight", target.lm_head.weight.detach())

    def combine(features: torch.Tensor) -> torch.Tensor:
        if norms == "input_norm":
            features = norm(features, weights["input_norm.weight"])
        elif norms == "fc_norm":
            features = torch.cat([norm(part, weights[f"fc_norm.{index}.weight"])
                                  for index, part in enumerate(features.chunk(3, -1))], -1)
        return linear(features, weights["fc.weight"], weights.get("fc.bias"))

    def layer(index: int, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = norm(hidden, weights[f"{prefix}hidden_norm.weight"])
        x = torch.cat([norm(embed[tokens], weights[f"{prefix}input_layernorm.weight"]), normed], -1)
        states = block(weights, prefix, x, normed if norm_before_residual else hidden)
        return linear(norm(states, weights["norm.weight"]), head), states

    return combine, layer, None if ids is None else ids.tolist()


def save_eagle(folder: Path, target: Any, *, layers: int = 1, bias: bool = True, own_embed: bool = False,
               architecture: str = "LlamaForCausalLM", pickled: bool = False) -> tuple[Any, Reference, None]:
    torch.manual_seed(2)
    weights: Weights = {"fc.weight": torch.randn(HIDDEN, 2 * HIDDEN) * 0.1}
    for index in range(layers):
        weights |= layer_weights(f"layers.{index}.", norms=("input_layernorm",) if index else ())
    if bias:
        weights["fc.bias"] = torch.randn(HIDDEN)
    if own_embed:
        weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    write(folder, architecture, weights, pickled=pickled, num_hidden_layers=layers)
    embed = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())

    def layer(index: int, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = linear(torch.cat([embed[tokens], hidden], -1), weights["fc.weight"], weights.get("fc.bias"))
        for number in range(layers):
            prefix = f"layers.{number}."
            x = block(weights, prefix, norm(x, weights[f"{prefix}input_layernorm.weight"]) if number else x, x)
        return linear(x, target.lm_head.weight), x

    return lambda features: features, layer, None


def save_nextn(folder: Path, target: Any, *, first: int = 0, depth: int = 1,
               architecture: str = "LlamaForCausalLMNextN") -> tuple[Any, Reference, None]:
    """Layers of multi-token prediction in a checkpoint of their own, as ``model.layers.<first>`` and so on."""
    torch.manual_seed(3)
    weights = mtp_weights(first, depth)
    shared = {f"model.layers.{first}.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    write(folder, architecture, weights | shared, num_hidden_layers=depth, num_nextn_predict_layers=depth)
    return mtp_reference(weights, first, target)


def add_nextn(folder: Path, target: Any, depth: int = 1) -> tuple[Any, Reference, None]:
    """Adds layers of multi-token prediction to the checkpoint of a model in ``folder``."""
    torch.manual_seed(3)
    config = json.loads((folder / "config.json").read_text())
    first = config["num_hidden_layers"]
    weights = mtp_weights(first, depth)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors | weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": depth}))
    return mtp_reference(weights, first, target)


def mtp_weights(first: int, depth: int) -> Weights:
    weights: Weights = {}
    for index in range(first, first + depth):
        name = f"model.layers.{index}."
        weights |= layer_weights(name) | {f"{name}{each}.weight": torch.rand(HIDDEN) + 0.5
                                          for each in ("enorm", "hnorm", "shared_head.norm")}
        weights[f"{name}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.1
    return weights


def mtp_reference(weights: Weights, first: int, target: Any) -> tuple[Any, Reference, None]:
    embed = target.get_input_embeddings().weight.detach()

    def layer(index: int, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"model.layers.{first + index}."
        x = linear(torch.cat([norm(embed[tokens], weights[f"{name}enorm.weight"]),
                              norm(hidden, weights[f"{name}hnorm.weight"])], -1), weights[f"{name}eh_proj.weight"])
        x = block(weights, name, norm(x, weights[f"{name}input_layernorm.weight"]), x)
        states = norm(x, weights[f"{name}shared_head.norm.weight"])
        return linear(states, target.lm_head.weight), states

    return lambda features: features, layer, None


@torch.inference_mode()
def reference_chain(combine: Any, layer: Reference, features: torch.Tensor, tokens: np.ndarray, count: int,
                    ids: list[int] | None = None, depth: int = 1) -> list[torch.Tensor]:
    """The logits of each of ``count`` greedy drafts, computed from all rows at once: ``features`` [n, F] of tokens
    0 to n - 1, the newest of ``tokens`` [n + 1] after them."""
    hidden, following = combine(features), torch.from_numpy(tokens[1:])
    found: list[torch.Tensor] = []
    for index in range(count):
        if index < depth:
            logits, states = layer(index, hidden, following)
        else:
            logits, states = layer(depth - 1, hidden, following)
        found.append(logits[-1])
        column = int(logits[-1].argmax())
        draft = torch.tensor([column if ids is None else ids[column]])
        if index + 1 < depth:
            hidden, following = states, torch.cat([following[1:], draft])
        else:
            hidden, following = torch.cat([hidden, states[-1:]]), torch.cat([following, draft])
    return found


def save_with_token_map(folder: Path) -> tuple[Any, list[int]]:
    """Saves a model, a smaller one and a map of every third token as ``model``, ``draft`` and ``map.txt``; returns the
    smaller one and the tokens."""
    save_model(folder / "model", "Llama")
    small = save_model(folder / "draft", "Qwen2", tie_word_embeddings=True)
    ids = list(range(0, 131, 3))
    (folder / "map.txt").write_text(" ".join(map(str, ids)))
    return small, ids


SAVE = {"EAGLE3": save_eagle3, "EAGLE": save_eagle, "NEXTN": save_nextn,
        "STANDALONE": lambda folder, target: save_model(folder, "Qwen2", num_hidden_layers=1)}
"""By algorithm: saves a draft model of random weights ``(folder, target)``."""


def save_models(folder: Path) -> None:
    """Saves a ``model``, and a draft model of it for each algorithm."""
    target = save_model(folder / "model", "Qwen3", eos_token_id=None)
    for algorithm, save in SAVE.items():
        save(folder / algorithm, target)
