"""Attention in torch whose rows do not depend on each other, nor on the step that computes them: for CPUs, in
deterministic mode.

A row reads keys in tiles of 128 positions, the first of which begins at position 0, and adds their results up in
order, in float32. So a token has the same bits as a decode step's row, in a chunk of a prompt of any length, and in a
step that verifies drafts. Products have few shapes: query rows, which are the heads of a token that share a KV head,
are padded to 4, 16 or 64; see ``kernels.reference.fixed_rows`` for the trial of these sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.elementwise import by_element
from ...kernels.reference.fixed_rows import invariant_sizes
from ..forward.forward_batch import ForwardBatch

TILE = 128
"""Positions of a tile."""

GatherTile = Callable[[torch.Tensor, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]
"""Takes ``pages`` and ``offsets`` [tiles, b, TILE]; returns float32 keys [tiles, b, heads, TILE, Dk] and values
[..., Dv] of these tokens."""


@dataclass(frozen=True)
class _Block:
    """Up to R query rows of each of b requests: ``rows`` [b, R] index (token, head of a group); ``real`` [b, R] are no
    padding; ``visible[i]`` [b, 1, R, TILE] are the keys of tile ``tiles[i]`` that they see."""

    rows: torch.Tensor
    real: torch.Tensor
    tiles: range
    visible: Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Bucket:
    """b requests whose keys are gathered together: ``pages``, ``offsets`` and ``present`` [tiles, b, TILE], and the
    blocks of their rows."""

    pages: torch.Tensor
    offsets: torch.Tensor
    present: torch.Tensor
    blocks: Sequence[_Block]


class FixedTiles:
    """The tiles of a batch's rows, for layers with ``group`` query heads a KV head, heads of ``dims`` (of keys and of
    values) and this ``window``."""

    def __init__(self, batch: ForwardBatch, page_size: int, group: int, dims: tuple[int, int], window: int | None):
        assert batch.mask is None, "a tree's keys do not lie in the order of positions"
        self._page_size = page_size
        self._group = group
        self._window = window
        self._sizes = _sizes(*dims)
        self._batch = batch
        lengths = (np.diff(batch.kv_indptr_cpu) - 1) * page_size + batch.kv_last_page_len_cpu
        self._q_lens = np.diff(batch.qo_indptr_cpu)
        positions = batch.positions.cpu().numpy()
        # Not the last row's: the positions of void rows at the end of a chain may be clamped.
        self._last = positions[batch.qo_indptr_cpu[:-1]] + self._q_lens - 1
        self._first = self._last + 1 - lengths  # the position of each page table's first token
        self._buckets = [self._bucket(members) for members in self._members()]

    def _members(self) -> list[np.ndarray]:
        """Requests of one block of the same size, and of about as many tiles, go together; others by themselves."""
        rows = self._q_lens * self._group
        sizes = np.array([next((size for size in self._sizes if size >= count), 0) for count in rows])
        tiles = self._last // TILE + 1
        keys: dict[tuple[int, int], list[int]] = {}
        for b in range(len(rows)):
            keys.setdefault((int(sizes[b]), int(tiles[b]).bit_length() if sizes[b] else -1 - b), []).append(b)
        return [np.array(members) for members in keys.values()]

    def _bucket(self, members: np.ndarray) -> _Bucket:
        last, first, batch = self._last[members], self._first[members], self._batch
        begin = 0 if self._window is None else max(0, int((last - self._q_lens[members] + 2 - self._window).min()))
        tiles = range(begin // TILE, int(last.max()) // TILE + 1)
        positions = np.arange(tiles.start * TILE, tiles.stop * TILE).reshape(-1, 1, TILE)
        index = positions - first[:, None]
        present = (index >= 0) & (positions <= last[:, None])
        index = np.where(present, index, 0)
        pages = batch.kv_indices_cpu[batch.kv_indptr_cpu[members][:, None] + index // self._page_size]
        return _Bucket(torch.from_numpy(pages.astype(np.int64)), torch.from_numpy(index % self._page_size),
                       torch.from_numpy(present), self._blocks(members, tiles))

    def _blocks(self, members: np.ndarray, tiles: range) -> list[_Block]:
        most = int(self._q_lens[members].max()) * self._group
        size = next((size for size in self._sizes if size >= most), self._sizes[-1])
        return [self._block(members, start, size, tiles) for start in range(0, most, size)]

    def _block(self, members: np.ndarray, start: int, size: int, tiles: range) -> _Block:
        row = np.arange(start, start + size)
        real = row < (self._q_lens[members] * self._group)[:, None]
        token = row // self._group
        own = np.where(real, (self._last - self._q_lens + 1)[members][:, None] + token, -1)
        rows = np.where(real, self._batch.qo_indptr_cpu[members][:, None] * self._group + row, 0)
        end = int(own.max()) // TILE + 1
        visible = [self._visible(own, tile) for tile in range(tiles.start, end)]
        return _Block(torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(real), range(end - tiles.start),
                      visible)

    def _visible(self, own: np.ndarray, tile: int) -> torch.Tensor:
        position = np.arange(tile * TILE, (tile + 1) * TILE)
        seen = position <= own[..., None]
        if self._window is not None:
            seen &= position > own[..., None] - self._window
        return torch.from_numpy(seen)[:, None]

    def attend(self, q: torch.Tensor, heads: int, scale: float, gather: GatherTile,
               sinks: torch.Tensor | None = None, softcap: float = 0.0) -> torch.Tensor:
        """Attends ``q`` [T, heads * group, Dk] to the stored tokens; returns float32 ``[T, heads * group, Dv]``.
        ``sinks`` [heads * group] are logits that join the denominators; ``softcap`` is as in ``Scores``."""
        of_rows = q.float().unflatten(1, (heads, -1)).transpose(1, 2).flatten(0, 1)  # [T * group, heads, Dk]
        out: torch.Tensor | None = None
        for bucket in self._buckets:
            keys, values = gather(bucket.pages, bucket.offsets)
            # Absent tokens have arbitrary values, and a weight of 0 times infinity would be NaN.
            values = values.masked_fill(~bucket.present[:, :, None, :, None], 0.0)
            if out is None:
                out = values.new_empty((*of_rows.shape[:2], values.shape[-1]))
            for block in bucket.blocks:
                queries = of_rows[block.rows].transpose(1, 2).contiguous()  # [b, heads, R, Dk]
                level = None if sinks is None else _of_rows(sinks.float(), heads, block.rows, self._group)
                result = _attend_block(queries, keys, values, block, scale, level, softcap)
                out[block.rows[block.real]] = result.transpose(1, 2)[block.real]
        assert out is not None, "a batch has rows"
        joined: torch.Tensor = out.unflatten(0, (-1, self._group)).transpose(1, 2).flatten(1, 2)
        return joined


def _of_rows(sinks: torch.Tensor, heads: int, rows: torch.Tensor, group: int) -> torch.Tensor:
    """Returns the sinks ``[b, heads, R]`` of a block's rows."""
    found: torch.Tensor = sinks.view(heads, group)[:, rows % group].transpose(0, 1)
    return found


def _attend_block(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: _Block, scale: float,
                  sinks: torch.Tensor | None, softcap: float) -> torch.Tensor:
    """Returns ``[b, heads, R, Dv]`` of queries ``[b, heads, R, Dk]``."""
    b, heads, rows, _ = q.shape
    top = q.new_full((b, heads, rows), float("-inf"))
    total = q.new_zeros((b, heads, rows))
    acc = q.new_zeros((b * heads, rows, values.shape[-1]))
    for tile, visible in zip(block.tiles, block.visible):
        scores = torch.bmm(q.flatten(0, 1), keys[tile].flatten(0, 1).transpose(1, 2)).view(b, heads, rows, TILE)
        scores = scores * scale
        if softcap:
            scores = by_element(torch.tanh, scores / softcap) * softcap
        scores = scores.masked_fill(~visible, float("-inf"))
        top, shrink, weights = _next_weights(top, scores)
        total = total * shrink + weights.sum(-1)
        acc = acc * shrink.flatten(0, 1)[..., None] + torch.bmm(weights.flatten(0, 1), values[tile].flatten(0, 1))
    if sinks is not None:
        _, shrink, weights = _next_weights(top, sinks[..., None])
        total = total * shrink + weights[..., 0]
        acc = acc * shrink.flatten(0, 1)[..., None]
    return acc.view(b, heads, rows, -1) / total[..., None]


def _next_weights(top: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the largest of ``top`` and a tile's scores, the factor of what was summed before, and the tile's weights.
    A row that has seen nothing yet keeps minus infinity, and adds nothing."""
    joint = torch.maximum(top, scores.amax(-1))
    finite = joint.masked_fill(joint == float("-inf"), 0.0)
    return joint, (top - finite).exp(), (scores - finite[..., None]).exp()


@functools.cache
def _sizes(key_dim: int, value_dim: int) -> Sequence[int]:
    """Returns the sizes of blocks of query rows, ascending."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn((1, TILE, dim), generator=generator) for dim in (key_dim, value_dim))

    def products(q: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(q[None].repeat(3, 1, 1), keys.transpose(1, 2).repeat(3, 1, 1))
        return torch.cat((scores, torch.bmm(scores, values.repeat(3, 1, 1))), -1)

    return invariant_sizes(((4, 16, 64), (16,)), key_dim, products)
