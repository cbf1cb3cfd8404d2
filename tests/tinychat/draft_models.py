"""tinychat's draft models in plain torch: an EAGLE3 head and an MTP layer, as they are trained and as the reference
loop of speculative decoding runs them. Parameters have the names of the checkpoints' tensors.

EAGLE-3 (Li et al., 2025, https://arxiv.org/abs/2503.01840) and the MTP module of DeepSeek-V3 (technical report, section
2.2). At position i both take the embedding of token i + 1 and a hidden state of position i, and predict token i + 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

NORM_EPS = 1e-6


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a draft layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def norm(size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=NORM_EPS)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of ``x`` [..., T, heads, D] at ``positions`` [..., T]: dimension i turns with i + D / 2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None].float() * frequency)[..., None, :]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Projections of grouped-query attention; ``inputs`` may be wider than the layer's hidden size."""

    def __init__(self, shape: LayerShape, inputs: int, qk_norm: bool):
        super().__init__()
        self._shape = shape
        self.q_proj = linear(inputs, shape.heads * shape.head_dim)
        self.k_proj = linear(inputs, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(inputs, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden)
        if qk_norm:
            self.q_norm, self.k_norm = norm(shape.head_dim), norm(shape.head_dim)
        self._qk_norm = qk_norm

    def query(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[..., T, kv_heads, heads / kv_heads, D]`` of ``x`` [..., T, inputs], rotary embedding applied."""
        q = self.q_proj(x).unflatten(-1, (self._shape.heads, self._shape.head_dim))
        q = rotate(self.q_norm(q) if self._qk_norm else q, positions, self._shape.rope_theta)
        return q.unflatten(-2, (self._shape.kv_heads, -1))

    def key_value(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[..., T, kv_heads, D]``."""
        k = self.k_proj(x).unflatten(-1, (self._shape.kv_heads, self._shape.head_dim))
        k = rotate(self.k_norm(k) if self._qk_norm else k, positions, self._shape.rope_theta)
        return k, self.v_proj(x).unflatten(-1, (self._shape.kv_heads, self._shape.head_dim))


class Mlp(nn.Module):
    def __init__(self, shape: LayerShape):
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.intermediate)
        self.up_proj = linear(shape.hidden, shape.intermediate)
        self.down_proj = linear(shape.intermediate, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):
    """The decoder layer of an EAGLE3 head: its attention reads embedding and hidden state side by side."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.self_attn = SelfAttention(shape, 2 * shape.hidden, qk_norm=False)
        self.mlp = Mlp(shape)
        self.input_layernorm, self.hidden_norm = norm(shape.hidden), norm(shape.hidden)
        self.post_attention_layernorm = norm(shape.hidden)


class Eagle3Head(nn.Module):
    """An EAGLE3 head. Its passes take the model's features through ``fc``, then its own states before ``norm``."""

    def __init__(self, shape: LayerShape, features: int, draft_vocabulary: Sequence[int], vocab_size: int):
        super().__init__()
        self.fc = linear(features * shape.hidden, shape.hidden)
        self.midlayer = Midlayer(shape)
        self.norm = norm(shape.hidden)
        self.lm_head = linear(shape.hidden, len(draft_vocabulary))
        ids = torch.tensor(sorted(draft_vocabulary))
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True))

    @property
    def attention(self) -> SelfAttention:
        return self.midlayer.self_attn

    def vocabulary(self) -> torch.Tensor:
        """``[draft vocabulary]`` int64: the token of each of the head's logits."""
        d2t = self.get_buffer("d2t")
        return d2t + torch.arange(len(d2t), device=d2t.device)

    def enter(self, features: torch.Tensor) -> torch.Tensor:
        """The hidden state of a first pass, of the model's ``features`` [..., 3 hidden]."""
        entered: torch.Tensor = self.fc(features)
        return entered

    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and what the attention reads."""
        layer = self.midlayer
        return hidden, torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)

    def leave(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The hidden state for the next pass, of the residual stream and the attention's output before ``o_proj``."""
        x: torch.Tensor = residual + self.midlayer.self_attn.o_proj(attended)
        return x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))

    def logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """``[..., draft vocabulary]``; the model's own ``lm_head`` is not used."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


class SharedHead(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm = norm(size)


class MtpLayer(nn.Module):
    """A layer of multi-token prediction with Qwen3's blocks. Its passes take hidden states after the model's final
    norm, then its own after ``shared_head.norm``; embedding and LM head are the model's."""

    def __init__(self, shape: LayerShape, vocab_size: int):
        super().__init__()
        self.enorm, self.hnorm = norm(shape.hidden), norm(shape.hidden)
        self.eh_proj = linear(2 * shape.hidden, shape.hidden)
        self.input_layernorm, self.post_attention_layernorm = norm(shape.hidden), norm(shape.hidden)
        self.self_attn = SelfAttention(shape, shape.hidden, qk_norm=True)
        self.mlp = Mlp(shape)
        self.shared_head = SharedHead(shape.hidden)
        self._vocab_size = vocab_size

    @property
    def attention(self) -> SelfAttention:
        return self.self_attn

    def vocabulary(self) -> torch.Tensor:
        return torch.arange(self._vocab_size, device=self.eh_proj.weight.device)

    def enter(self, features: torch.Tensor) -> torch.Tensor:
        """``features`` [..., hidden], as they are."""
        return features

    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        return x, self.input_layernorm(x)

    def leave(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = residual + self.self_attn.o_proj(attended)
        left: torch.Tensor = self.shared_head.norm(x + self.mlp(self.post_attention_layernorm(x)))
        return left

    def logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, lm_head.to(hidden.dtype))


DraftLayer = Eagle3Head | MtpLayer
"""What both have in common: ``attention``, ``enter``, ``join``, ``leave``, ``logits``, ``vocabulary``."""
