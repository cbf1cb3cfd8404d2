"""What is done with a layer's queries, keys and values before rope, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ...config.model import ModelSpec
from ...distributed.tp import TPGroup
from ...weights.slots import Allocate, Slot


class QKVStep(Protocol):
    """A step over a rank's rows of queries, keys and values side by side."""

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns the rows that take the place of ``qkv`` [T, sum of the heads' values], which it may overwrite."""

    def slots(self) -> Iterator[Slot]: ...


MakeQKVStep = Callable[[str, ModelSpec, TPGroup, Sequence[int], Allocate], QKVStep]
"""Builds the step ``(name of the attention, spec, tp, this rank's heads of q, k and v, allocate)`` of a layer."""


class Clip:
    """Keeps values between ``-limit`` and ``limit``."""

    def __init__(self, limit: float):
        self._limit = limit

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv.clamp_(-self._limit, self._limit)

    def slots(self) -> Iterator[Slot]:
        yield from ()


def clip(limit: float | None) -> MakeQKVStep | None:
    """Returns a factory of Clips; None without a limit."""
    return None if limit is None else lambda name, spec, tp, heads, allocate: Clip(limit)


class RowNorms:
    """Root-mean-square norms over the whole rows of queries and of keys, of all ranks' heads (OLMo 2)."""

    def __init__(self, name: str, spec: ModelSpec, tp: TPGroup, heads: Sequence[int], allocate: Allocate, *, eps: float,
                 parts: tuple[str, str]):
        self._eps = eps
        self._tp = tp
        dim = spec.head_dim
        self._sizes = [count * dim for count in heads]
        self._full = (spec.num_heads * dim, spec.num_kv_heads * dim)
        # Ranks that have a copy of the same KV head count it once.
        self._copies = (1, tp.size * heads[1] // spec.num_kv_heads)
        starts = (tp.rank * heads[0] * dim, tp.rank * spec.num_kv_heads // tp.size * dim)
        self.weights = [allocate(size) for size in self._sizes[:2]]
        self._slots = [Slot(f"{name}.{part}.weight", weight, (full,), 0, start)
                       for part, weight, full, start in zip(parts, self.weights, self._full, starts)]

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        rows = qkv.split(self._sizes, -1)[:2]
        wide = [x.float() for x in rows]
        squares = torch.stack([x.square().sum(-1) / (full * copies)
                               for x, full, copies in zip(wide, self._full, self._copies)])
        if self._tp.size > 1 and squares.numel():
            squares = self._tp.all_reduce(squares)
        for x, values, scale, weight in zip(rows, wide, torch.rsqrt(squares + self._eps), self.weights):
            x.copy_((values * scale[:, None]).to(qkv.dtype) * weight)
        return qkv

    def slots(self) -> Iterator[Slot]:
        yield from self._slots


def row_norms(eps: float, parts: tuple[str, str] = ("q_norm", "k_norm")) -> MakeQKVStep:
    """Returns a factory of RowNorms, with the names ``parts`` below the attention's."""
    return lambda name, spec, tp, heads, allocate: RowNorms(name, spec, tp, heads, allocate, eps=eps, parts=parts)


class EachHeadNorms:
    """LayerNorms without bias over each head of queries and keys, with weights of its own for every head: one tensor
    [H, D] (Command-R+), or where ``of_head`` names it one [D] for each head (StableLM)."""

    def __init__(self, name: str, spec: ModelSpec, tp: TPGroup, heads: Sequence[int], allocate: Allocate, *, eps: float,
                 parts: tuple[str, str], of_head: str):
        self._eps = eps
        self._dim = dim = spec.head_dim
        self._heads = heads
        self.weights = [allocate(count, dim) for count in heads[:2]]
        self._slots: list[Slot] = []
        starts = (tp.rank * heads[0], tp.rank * spec.num_kv_heads // tp.size)
        for part, weight, full, start in zip(parts, self.weights, (spec.num_heads, spec.num_kv_heads), starts):
            if not of_head:
                self._slots.append(Slot(f"{name}.{part}.weight", weight, (full, dim), 0, start))
                continue
            for head in range(full):
                own = weight[head - start] if start <= head < start + len(weight) else weight[:0, 0]
                self._slots.append(Slot(f"{name}.{part}.{of_head.format(head)}.weight", own, (dim,)))

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, _ = qkv.view(len(qkv), -1, self._dim).split_with_sizes(list(self._heads), 1)
        for x, weight in zip((q, k), self.weights):
            wide = torch.nn.functional.layer_norm(x.float(), (self._dim,), None, None, self._eps)
            x.copy_(wide * weight.float())
        return qkv

    def slots(self) -> Iterator[Slot]:
        yield from self._slots


def each_head_norms(eps: float, parts: tuple[str, str] = ("q_norm", "k_norm"), of_head: str = "") -> MakeQKVStep:
    """Returns a factory of EachHeadNorms, with the names ``parts`` below the attention's. ``of_head``: the name of a
    head's own, with its number in braces."""
    return lambda name, spec, tp, heads, allocate: EachHeadNorms(name, spec, tp, heads, allocate, eps=eps, parts=parts,
                                                                 of_head=of_head)


class _Chain:
    def __init__(self, steps: Sequence[QKVStep]):
        self._steps = steps

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        for step in self._steps:
            qkv = step(qkv)
        return qkv

    def slots(self) -> Iterator[Slot]:
        for step in self._steps:
            yield from step.slots()


def in_order(*steps: MakeQKVStep | None) -> MakeQKVStep | None:
    """Returns a factory of these steps, one after the other, without those that are None."""
    made = [step for step in steps if step is not None]
    if len(made) < 2:
        return made[0] if made else None
    return lambda name, spec, tp, heads, allocate: _Chain([make(name, spec, tp, heads, allocate) for make in made])
