"""Parameters of kernels and their twins that are no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

By = Literal["block", "row"]


class HeadNorms(NamedTuple):
    """Root-mean-square norms over each head, before rope is applied: weights [D] of queries and of keys."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class RowMask(NamedTuple):
    """Which slots the rows of a batch see. All of a request's rows see all slots but its last ``counts[b]`` ([B] int32,
    64 at most), and of these the j-th where bit j of the row's word is set (``words`` [T] int64). The set bits are the
    row's ancestors and itself: as many tokens precede it as there are slots before, and other bits."""

    words: torch.Tensor
    counts: torch.Tensor


class Float8Format(NamedTuple):
    """The format of a float8 product's activations: a scale for each ``group`` of a row's values, of which the last may
    be smaller, or the one static scale ``known`` [1] for all."""

    group: int
    known: torch.Tensor | None = None


class Float8Rows(NamedTuple):
    """Quantized rows of ``dtype``: ``values`` [T, width] float8 (e4m3), contiguous, and ``scale`` float32
    [T, ceil(width / group)], contiguous over the tokens of a group, or [1]. A value times its scale is the original."""

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


class Choice(Protocol):
    """Parameters of routing, by which a token's experts are chosen, named as in ``common.config.moe.MoESpec``."""

    @property
    def top_k(self) -> int: ...

    @property
    def scoring(self) -> str: ...

    @property
    def renormalize(self) -> bool: ...

    @property
    def scaling_factor(self) -> float: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def top_groups(self) -> int: ...

    @property
    def group_score(self) -> str: ...


@dataclass(frozen=True)
class Scales:
    """Float32 scales of float8 experts. ``block``: one for 128 x 128 values, ``gate_up`` [S, ceil(2 * I / 128),
    ceil(H / 128)] and ``down`` [S, ceil(H / 128), ceil(I / 128)], where I is a multiple of 128. ``row``: one for an
    output, [S, 2 * I] and [S, H]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    by: By


class ExpertBiases(NamedTuple):
    """Biases of experts' products: ``gate_up`` [S, 2 * I] and ``down`` [S, H], contiguous."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """Pages ``[first_page, last_page)`` of the batch's ``kv_indices``, and the query rows that attend to them.

    ``table`` [B, 3] int32 has for each request: the index of its first token among the segment's tokens; how many
    tokens of it the segment has; and the position of its first query row's own token, counted from that first token:
    after the segment, within it, or (negative) before it. Block i of rows starts at row ``block_row[i]`` of request
    ``block_request[i]`` (int32).
    """

    first_page: int
    last_page: int
    table: torch.Tensor
    block_request: torch.Tensor
    block_row: torch.Tensor
