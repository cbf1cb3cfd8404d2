"""Reads checkpoints whose rotary embeddings turn neighbouring values of a head (GPT-J, GLM, Command-R): rows of queries
and keys are put in the order in which kernels turn them, so that a model runs as all others do.

Scores are sums over a head's values, so their order is free as long as queries and keys agree on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from .fused_tensors import OF_INPUTS
from .lazy import Derived, InMemory, LazyTensor
from .loader import TensorParts

_UNPACKED = ("weight", "bias", "weight_scale", "weight_packed", "absmax", "SCB")
"""Parts of a quantized or plain projection that have a row for each of its outputs."""
_WITHOUT_ROWS = (*OF_INPUTS, "weight_scale_inv", "k_scale")


def half_order(rotary_dim: int, head_dim: int) -> torch.Tensor:
    """Returns ``order`` [head_dim] int64: value i of a head for kernels, which turn values i and i + rotary_dim / 2
    together, is the checkpoint's value ``order[i]``, where values 2 i and 2 i + 1 are turned together."""
    turned = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    return torch.cat((turned, torch.arange(rotary_dim, head_dim)))


class ReorderedRows(Derived):
    """A LazyTensor with the rows of each head of ``tensor`` in another ``order``. Slices hold whole heads."""

    def __init__(self, tensor: LazyTensor, order: torch.Tensor):
        super().__init__(tensor)
        self._order = order

    def __getitem__(self, key: Any) -> torch.Tensor:
        heads: torch.Tensor = self._tensor[key].unflatten(0, (-1, len(self._order)))
        return heads[:, self._order].flatten(0, 1)


def halves_of(spec: ModelSpec, rotary_dim: int, parts: TensorParts | None = None,
              names: tuple[str, str] = ("q_proj", "k_proj"), norms: Collection[str] = ()) -> TensorParts:
    """Returns ``parts`` of a family (by default a checkpoint's tensors as they are) with the rows of queries and keys,
    which are ``names``, in the order of ``half_order``, and so the last dimension of the weights of ``norms`` of their
    heads. The function raises ConfigError for a quantized projection whose outputs are packed together."""
    order = half_order(rotary_dim, spec.head_dim)
    rows_of = dict(zip(names, (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)))

    def reorder(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        for own, part in ((name, tensor),) if parts is None else parts(name, tensor):
            projection, _, kind = own.rpartition(".")
            rows = rows_of.get(projection.rpartition(".")[2])
            if projection.rpartition(".")[2] in norms:
                yield own, InMemory(part[...][..., order])
            elif rows is None or kind in _WITHOUT_ROWS:
                yield own, part
            elif kind in _UNPACKED and part.get_shape()[:1] == [rows]:
                yield own, ReorderedRows(part, order)
            elif kind == "weight_scale" and part.get_shape() in ([], [1], [1, 1]):
                yield own, part
            else:
                raise ConfigError(f"{own} packs outputs of a projection with interleaved rotary embeddings, which are "
                                  "read in another order: use an unquantized or float8 checkpoint, or a "
                                  "symmetric one of compressed-tensors.")

    return reorder
