"""Greedy speculative decoding in plain torch and transformers, without any of Baton: the tokens and acceptance lengths
that an engine must reproduce.

The loop is that of Leviathan et al., "Fast inference from transformers via speculative decoding" (2023), for greedy
sampling: the target computes its newest token and the drafts after it, and keeps those that it says itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import DynamicCache, Qwen3ForCausalLM

from baton.tests.tinychat.draft_batches import feature_layers
from baton.tests.tinychat.draft_models import DraftLayer, Eagle3Head, LayerShape, MtpLayer


@dataclass(frozen=True)
class Rows:
    """What the target computed of some positions: its logits, and the hidden states that draft layers read."""

    logits: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor


class Target:
    """A transformers model with the KV cache of one request."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.eval().requires_grad_(False)
        self.eos = int(model.config.eos_token_id)
        self._layers = feature_layers(model.config.num_hidden_layers)
        self._cache = DynamicCache()

    def reset(self) -> None:
        self._cache = DynamicCache()

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], start: int) -> Rows:
        """Compute ``tokens`` at positions from ``start`` on; what was cached there and behind is forgotten."""
        if start < self._cache.get_seq_length():
            self._cache.crop(start - self._cache.get_seq_length())
        output = self.model.model(torch.tensor([tokens]), past_key_values=self._cache, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer][0] for layer in self._layers], dim=-1)
        last = output.last_hidden_state[0]
        return Rows(self.model.lm_head(last), features, last)


class Drafter(Protocol):
    """Drafts for one request."""

    def reset(self) -> None: ...

    def draft(self, tokens: Sequence[int], rows: Rows, start: int, count: int) -> list[int]:
        """``count`` tokens after ``tokens``, all that are known. ``rows`` are the target's from position ``start`` on;
        those from the newest token on are of drafts, and void."""


class LayerDrafter:
    """Drafts with an EAGLE3 head or an MTP layer: slot i caches token i + 1 with the hidden state of position i."""

    def __init__(self, layer: DraftLayer, target: Target):
        self._layer = layer.eval().requires_grad_(False)
        self._target = target.model
        self._vocabulary = layer.vocabulary()
        self.reset()

    def reset(self) -> None:
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], rows: Rows, start: int, count: int) -> list[int]:
        following = tokens[start + 1:]
        features = rows.features if isinstance(self._layer, Eagle3Head) else rows.last
        hidden = self._run(self._layer.enter(features[:len(following)]), start, following)[-1:]
        drafts: list[int] = []
        while True:
            logits = self._layer.logits(hidden, self._target.lm_head.weight)
            drafts.append(int(self._vocabulary[logits.argmax()]))
            if len(drafts) == count:
                return drafts
            hidden = self._run(hidden, start + len(following) + len(drafts) - 1, drafts[-1:])

    def _run(self, hidden: torch.Tensor, start: int, following: Sequence[int]) -> torch.Tensor:
        """Hidden states of slots from ``start`` on, whose KV replaces what was cached from there."""
        attention, positions = self._layer.attention, torch.arange(start, start + len(following))
        residual, x = self._layer.join(F.embedding(torch.tensor(following), self._target.lm_head.weight), hidden)
        k, v = attention.key_value(x, positions)
        if self._cached is not None:
            k, v = (torch.cat([old[:start], new]) for old, new in zip(self._cached, (k, v)))
        self._cached = (k, v)
        q = attention.query(x, positions)
        scores = torch.einsum("qkgd,lkd->kgql", q.float(), k.float()) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.arange(len(k)) > positions[:, None], -torch.inf)
        attended = torch.einsum("kgql,lkd->qkgd", scores.softmax(-1), v.float()).to(x.dtype)
        return self._layer.leave(residual, attended.flatten(1))


class ModelDrafter:
    """Drafts with a model of its own: slot i caches token i."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self._model = Target(folder, dtype)

    def reset(self) -> None:
        self._model.reset()

    def draft(self, tokens: Sequence[int], rows: Rows, start: int, count: int) -> list[int]:
        drafts: list[int] = []
        pending, begin = list(tokens[start:]), start
        while len(drafts) < count:
            logits = self._model(pending, begin).logits[-1]
            begin, pending = begin + len(pending), [int(logits.argmax())]
            drafts += pending
        return drafts


def load_layer(folder: Path, dtype: torch.dtype) -> DraftLayer:
    """An EAGLE3 head or an MTP layer of a checkpoint; every tensor must be there and be used."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = LayerShape(config["hidden_size"], config["intermediate_size"], config["num_attention_heads"],
                       config["num_key_value_heads"], config["head_dim"], config["rope_theta"])
    tensors = load_file(folder / "model.safetensors")
    layer: DraftLayer
    if "fc.weight" in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        layer = Eagle3Head(shape, tensors["fc.weight"].shape[1] // shape.hidden, ids.tolist(), config["vocab_size"])
    else:
        prefix = f"model.layers.{config['num_hidden_layers']}."
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        layer = MtpLayer(shape, config["vocab_size"])
    layer.load_state_dict(tensors)
    return layer.to(dtype)


def load_drafter(folder: Path, target: Target) -> Drafter:
    """The drafter of a checkpoint."""
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = target.model.dtype
    own = architecture["architectures"] == ["Qwen3ForCausalLM"] and "num_nextn_predict_layers" not in architecture
    return ModelDrafter(folder, dtype) if own else LayerDrafter(load_layer(folder, dtype), target)


@dataclass(frozen=True)
class Generated:
    """Output tokens, the end of turn among them, and how many tokens each verify step gave."""

    tokens: list[int]
    accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens of a verify step, the target's own among them."""
        return sum(self.accepted) / max(1, len(self.accepted))


def plain(target: Target, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy tokens, one at a time."""
    target.reset()
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + max_tokens:
        logits = target(tokens[start:], start).logits[-1]
        start = len(tokens)
        tokens.append(int(logits.argmax()))
        if tokens[-1] == target.eos:
            break
    return tokens[len(prompt):]


def speculative(target: Target, drafter: Drafter, prompt: Sequence[int], max_tokens: int, drafts: int) -> Generated:
    """Greedy tokens with up to ``drafts`` drafts a step, never more than could be accepted."""
    target.reset()
    drafter.reset()
    tokens, end, accepted, start = list(prompt), len(prompt) + max_tokens, [], 0
    rows = target(tokens, start)
    tokens.append(int(rows.logits[-1].argmax()))
    while tokens[-1] != target.eos and len(tokens) < end:
        count = min(drafts, end - len(tokens) - 1)
        proposed = drafter.draft(tokens, rows, start, count) if count else []
        start = len(tokens) - 1
        rows = target([tokens[-1], *proposed], start)
        samples: list[int] = rows.logits.argmax(-1).tolist()
        length = 1
        while length <= len(proposed) and proposed[length - 1] == samples[length - 1]:
            length += 1
        new = samples[:length]
        if target.eos in new:
            new = new[:new.index(target.eos) + 1]
        tokens += new
        accepted.append(len(new))
    return Generated(tokens[len(prompt):], accepted)


def step_lengths(target: Target, drafter: Drafter, prompt: Sequence[int], output: Sequence[int],
                 drafts: int) -> list[int]:
    """How many of the greedy ``output`` tokens a verify step gives that begins with i + 1 of them known, for each i but
    the last: a step's drafts depend on the tokens before it alone, wherever and in whatever steps these were computed.
    """
    target.reset()
    drafter.reset()
    tokens = [*prompt, *output]
    rows, start, lengths = target(tokens, 0), 0, []
    for known in range(len(prompt) + 1, len(tokens)):
        behind = Rows(*(part[start:] for part in (rows.logits, rows.features, rows.last)))
        proposed = drafter.draft(tokens[:known], behind, start, drafts)
        start = known - 1
        length = 1
        while length <= drafts and tokens[known + length - 1:known + length] == proposed[length - 1:length]:
            length += 1
        lengths.append(min(length, len(tokens) - known))
    return lengths
