"""What kernels and their twins take beside tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

By = Literal["block", "row"]


class HeadNorms(NamedTuple):
    """Root-mean-square norms over each head, before it is turned: weights [D] of queries and of keys."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class Float8Format(NamedTuple):
    """How a product wants its rows in float8: with a scale for each ``group`` of a row's values, of which the last may
    be smaller, or by the one scale ``known`` [1] for all."""

    group: int
    known: torch.Tensor | None = None


class Float8Rows(NamedTuple):
    """``values`` [T, width] float8 (e4m3), contiguous, of rows of ``dtype``; a value times its ``scale``, float32
    [T, ceil(width / group)] with a group's scales beside each other, or [1], is what it was."""

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


class Choice(Protocol):
    """How a token chooses; the words are those of ``common.config.moe.MoESpec``."""

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
    """What experts' products have added to them: ``gate_up`` [S, 2 * I] and ``down`` [S, H], contiguous."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """Pages ``[first_page, last_page)`` of the batch's ``kv_indices``, and who looks at them.

    ``table`` [B, 3] int32 has of each request: the place of its first token here, among the segment's; how many tokens
    the segment has of it; and where its first query row's own token stands, counted from that first token: beyond the
    segment, within it, or (negative) before it. Block i of rows starts at row ``block_row[i]`` of request
    ``block_request[i]`` (int32).
    """

    first_page: int
    last_page: int
    table: torch.Tensor
    block_request: torch.Tensor
    block_row: torch.Tensor
