"""The order in which the KV pool stores the channels of keys: heavy ones first, as calibrated for a model.

The file is a JSON object as the authors of "Post-Training Sparse Attention with Double Sparsity" (arXiv:2408.07092)
calibrate it: ``model.layers.N.self_attn.T_proj`` for each layer N and type T (``qk``, ``k`` or ``q``) is a list with an
entry for each head, which lists the head's channels, the heaviest first. Keys have an entry for each KV head; the other
types may have one for each query head.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..config.server.sparsity import SparsityArgs


@dataclass(frozen=True, eq=False)
class ChannelOrder:
    """``channels`` [layers, KV heads, head_dim] int32: for each layer and KV head of the whole model a permutation of
    the channels of its keys. ``digest`` is the same of equal orders only."""

    channels: np.ndarray

    @classmethod
    def read(cls, args: SparsityArgs, spec: ModelSpec) -> ChannelOrder | None:
        """Reads the order of a model's channels; None without --enable-double-sparsity. Raises ConfigError where the
        file does not fit the model, or the model has no keys of which a part could be read."""
        if not args.enable_double_sparsity:
            return None
        assert args.ds_channel_config_path is not None
        check_model(spec)
        if args.ds_heavy_channel_num > spec.head_dim:
            raise ConfigError(f"--ds-heavy-channel-num {args.ds_heavy_channel_num} must be {spec.head_dim} or less, "
                              "the values of the model's heads.")
        return cls(_read(args.ds_channel_config_path, args.ds_heavy_channel_type, spec.num_layers, spec.num_heads,
                         spec.num_kv_heads, spec.head_dim))

    @property
    def digest(self) -> str:
        return blake2b(self.channels.tobytes(), digest_size=8, person=b"baton channels").hexdigest()

    def of_rank(self, layers: Sequence[int], tp_rank: int, tp_size: int) -> np.ndarray:
        """Returns ``[layers, rank's KV heads, head_dim]``: ranks split the heads evenly; more ranks than heads share
        them."""
        heads = self.channels.shape[1]
        first = tp_rank * heads // tp_size
        return self.channels[list(layers), first:first + max(1, heads // tp_size)]


def check_model(spec: ModelSpec) -> None:
    """Raises ConfigError where double sparsity cannot run the model."""
    if spec.mla is not None:
        raise ConfigError("--enable-double-sparsity needs keys of each head, and this model has multi-head latent "
                          "attention: leave it out.")
    if any(window is not None for window in spec.windows_of(range(spec.num_layers))):
        raise ConfigError("--enable-double-sparsity is for layers that see all tokens, and this model has sliding "
                          "windows: leave it out.")
    if spec.scores.softcap:
        raise ConfigError(f"--enable-double-sparsity does not cap scores, and this model's are capped at "
                          f"{spec.scores.softcap:g}: leave it out.")


@functools.lru_cache(4)
def _read(path: str, kind: str, layers: int, heads: int, kv_heads: int, dim: int) -> np.ndarray:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ds-channel-config-path {path} cannot be read as JSON: {error}.") from None
    names = [f"model.layers.{layer}.self_attn.{kind}_proj" for layer in range(layers)]
    return np.stack([_of_kv_heads(path, content, name, heads, kv_heads, dim) for name in names])


def _of_kv_heads(path: str, content: Any, name: str, heads: int, kv_heads: int, dim: int) -> np.ndarray:
    """Returns the order [KV heads, head_dim] of a layer's channels."""
    if not isinstance(content, dict) or name not in content:
        raise ConfigError(f"--ds-channel-config-path {path} has no {name}: calibrate this model, or choose another "
                          "--ds-heavy-channel-type.")
    try:
        order = np.array(content[name], np.int32)
    except (TypeError, ValueError, OverflowError):
        order = np.empty(0, np.int32)
    fits = order.shape in ((heads, dim), (kv_heads, dim)) and (np.sort(order, -1) == np.arange(dim)).all()
    if not fits:
        raise ConfigError(f"{name} of --ds-channel-config-path {path} must have, for each of {kv_heads} KV heads or "
                          f"{heads} query heads, all channels from 0 to {dim - 1}, the heaviest first: calibrate this "
                          "model.")
    if len(order) == kv_heads:
        return order
    # One key serves several query heads: its channels stand by their mean place in the orders of these.
    places = order.argsort(-1).reshape(kv_heads, heads // kv_heads, dim).sum(1)
    joined: np.ndarray = places.argsort(-1, kind="stable").astype(np.int32)
    return joined
