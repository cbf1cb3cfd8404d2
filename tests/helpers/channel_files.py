"""Files of heavy channels, as --ds-channel-config-path takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from baton.common.config.server import SparsityArgs


def save_random_channels(folder: Path, layers: int, heads: int, dim: int, *, kind: str = "qk", seed: int = 0) -> Path:
    """Saves random orders of the channels of ``heads`` in each layer."""
    rng = np.random.default_rng(seed)
    path = folder / f"channels-{kind}-{heads}-{seed}.json"
    path.write_text(json.dumps({f"model.layers.{layer}.self_attn.{kind}_proj": [
        rng.permutation(dim).tolist() for _ in range(heads)] for layer in range(layers)}))
    return path


def sparsity(path: Path, **flags: Any) -> SparsityArgs:
    """Double sparsity above 8 tokens; by default 512 tokens of all 16 channels, which leaves nothing out."""
    return SparsityArgs(True, str(path), **{"ds_heavy_channel_num": 16, "ds_heavy_token_num": 512,
                                            "ds_sparse_decode_threshold": 8, **flags})
