"""Models of dummy weights with a draft model each, as folders with a config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .dummy_engine import TINY
from .many_gpus import shape_of
from .relay import LLAMA_8B

CURVE = (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71)
"""Tokens of a step with k = 1 to 7 drafts (Kimi-K2.5's EAGLE3 head on SPEED-Bench)."""
SHARES = tuple(round(after - before, 2) for before, after in zip((1.0, *CURVE), CURVE))
"""The share of steps that accept the draft at each position, and those before it."""
DRAFT_VOCAB = 32_000
_ONLY_SHAPES = ("architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads",
                "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
                "rope_theta", "torch_dtype")


def eagle3_shape(model: dict[str, Any], draft_vocab: int = DRAFT_VOCAB) -> dict[str, Any]:
    """The config.json of an EAGLE3 head of one layer for ``model``, whose layer is like the model's own."""
    return {**{name: model[name] for name in _ONLY_SHAPES if name in model}, "num_hidden_layers": 1,
            "architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False, "draft_vocab_size": draft_vocab}


@dataclass(frozen=True)
class SpeculativeModel:
    """``draft``: the draft model's config.json; None where its layers are in the model's checkpoint."""

    algorithm: str
    shape: dict[str, Any]
    draft: dict[str, Any] | None = None

    def with_layers(self, count: int | None) -> SpeculativeModel:
        """The model with ``count`` layers; None: with all."""
        return self if count is None else replace(self, shape={**self.shape, "num_hidden_layers": count})

    def write(self, folder: Path) -> tuple[list[str], list[str]]:
        """Writes both; returns the flags of the model, and those of speculation."""
        flags = ["--speculative-algorithm", self.algorithm]
        _write(folder / "model", self.shape)
        if self.draft is not None:
            _write(folder / "draft", self.draft)
            flags += ["--speculative-draft-model-path", str(folder / "draft")]
        return ["--model-path", str(folder / "model"), "--load-format", "dummy"], flags


def _write(folder: Path, shape: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))


def _with_mtp(shape: dict[str, Any]) -> SpeculativeModel:
    """A model with a layer of multi-token prediction, which is like its own last one."""
    return SpeculativeModel("NEXTN", {**shape, "num_nextn_predict_layers": 1})


MODELS = {
    "llama-8b": SpeculativeModel("EAGLE3", LLAMA_8B, eagle3_shape(LLAMA_8B)),
    "qwen3-30b-a3b": _with_mtp(shape_of("qwen3-30b-a3b")),
    "deepseek-v2-lite": _with_mtp(shape_of("deepseek-v2-lite")),
    "tiny": SpeculativeModel("EAGLE3", TINY | {"num_hidden_layers": 4}, eagle3_shape(TINY, 128)),
    "tiny-moe": _with_mtp(shape_of("small-qwen3-moe")),
    "tiny-mla": _with_mtp(shape_of("small-deepseek")),
}
"""The tiny ones are for a look at the scripts on a CPU."""
