"""The part of a page that a rank has: all of its layers, and a range of the KV heads.

A body lies as the slots of host memory do: one pool after the other, ``[layers, planes, heads, head bytes]`` each. The
layer groups of a pool follow each other, so that their number does not matter. Ranks of another tensor-parallel size
have other ranges of heads: a body may be cut out of a wider one, or joined from narrower ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..layout import DTYPE_BYTES, KVLayout


@dataclass(frozen=True)
class PoolShape:
    """A page in one pool. ``num_heads`` are the model's; ``head_bytes`` those of one head in one plane of a layer."""

    num_layers: int
    planes: int
    num_heads: int
    head_bytes: int

    @classmethod
    def of(cls, layout: KVLayout, num_heads: int) -> PoolShape:
        """``num_heads`` of the model, whose rank ``layout`` describes; latents are one head."""
        head_bytes = layout.page_size * layout.head_dim * DTYPE_BYTES[layout.dtype]
        return cls(layout.num_layers, layout.planes, 1 if layout.form == "latent" else num_heads, head_bytes)

    def heads(self, split: int, index: int) -> range:
        """The heads of part ``index`` of ``split`` equal ones; with more parts than heads each head is repeated."""
        first = index * self.num_heads // split
        return range(first, first + max(1, self.num_heads // split))

    def fits(self, split: int) -> bool:
        """Returns whether the heads can be split like this."""
        return self.num_heads % split == 0 or split % self.num_heads == 0

    def layer_bytes(self, split: int) -> int:
        return self.planes * max(1, self.num_heads // split) * self.head_bytes


@dataclass(frozen=True)
class Rectangle:
    """The heads of one object: part ``index`` of ``split`` equal ones."""

    split: int
    index: int


@dataclass(frozen=True)
class PageShape:
    """A page of rank ``tp_rank`` of ``tp_size``; ``layers`` are numbered as in the model. The heads of an object are
    counted in the pool that has most, ``num_heads``."""

    pools: tuple[PoolShape, ...]
    layers: range
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def num_heads(self) -> int:
        return max(pool.num_heads for pool in self.pools)

    @property
    def own(self) -> Rectangle:
        """This rank's heads. Ranks that repeat the same heads have the same."""
        split = min(self.tp_size, self.num_heads)
        return Rectangle(split, self.tp_rank * split // self.tp_size)

    @property
    def is_writer(self) -> bool:
        """True for one of the ranks that have the same heads."""
        return self.tp_rank % (self.tp_size // self.own.split) == 0

    @property
    def sources(self) -> list[list[Rectangle]]:
        """The ways to assemble this rank's page, each a list of objects: its own; one that has more heads, the least
        first; several that have fewer."""
        split, index = self.own.split, self.own.index
        splits = [other for other in range(1, self.num_heads + 1) if self.num_heads % other == 0
                  and all(pool.fits(other) and pool.fits(split) for pool in self.pools)]
        wider = [other for other in splits if split > other and split % other == 0]
        narrower = [other for other in splits if other > split and other % split == 0]
        return [[self.own], *([Rectangle(other, index * other // split)] for other in reversed(wider)),
                *([Rectangle(other, index * other // split + i) for i in range(other // split)] for other in narrower)]

    def pool_bytes(self, rectangle: Rectangle) -> list[int]:
        """Bytes of each pool in the body of an object."""
        return [pool.num_layers * pool.layer_bytes(rectangle.split) for pool in self.pools]

    def body_bytes(self, rectangle: Rectangle) -> int:
        return sum(self.pool_bytes(rectangle))

    def heads(self, rectangle: Rectangle) -> range:
        """The heads of an object in the pool that has most."""
        return max(self.pools, key=lambda pool: pool.num_heads).heads(rectangle.split, rectangle.index)

    def unpack(self, rectangle: Rectangle, body: np.ndarray, slot: Sequence[np.ndarray]) -> None:
        """Copies the heads of this rank that ``body`` (uint8) of an object has into the memory of a slot (uint8), a
        contiguous array for each layer group."""
        own = self.own
        for pool, layers, target in self._layers(rectangle, body, slot):
            ours, theirs = pool.heads(own.split, own.index), pool.heads(rectangle.split, rectangle.index)
            first, end = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
            shape = pool.planes, -1, pool.head_bytes
            source = layers.reshape(-1, pool.planes, len(theirs), pool.head_bytes)
            target.reshape(len(source), *shape)[:, :, first - ours.start:end - ours.start] = (
                source[:, :, first - theirs.start:end - theirs.start])

    def _layers(self, rectangle: Rectangle, body: np.ndarray,
                slot: Sequence[np.ndarray]) -> Iterator[tuple[PoolShape, np.ndarray, np.ndarray]]:
        """Yields each layer group's pool, bytes in ``body`` and memory."""
        groups, begin = iter(slot), 0
        for pool in self.pools:
            layers = pool.num_layers
            while layers > 0:
                target = next(groups)
                count = target.nbytes // pool.layer_bytes(self.own.split)
                end = begin + count * pool.layer_bytes(rectangle.split)
                yield pool, body[begin:end], target
                begin, layers = end, layers - count
            assert layers == 0, "a layer group lies in two pools"
