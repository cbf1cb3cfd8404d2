"""Who writes what to whom when prefill and decode are cut differently: tensor-parallel sizes and layer groups.

A *lane* leads from one prefill rank to one decode rank. It carries those heads that the one is to get from the other,
of every layer that the prefill rank has: all, or those of its stage. KV heads are shared evenly; with more ranks than
heads, neighbouring ranks hold the same head, and the decode ranks that need it take turns with those that hold it.
(Latents are one head, which every rank holds.) A prefill rank that nobody needs has a lane without heads, so that every
rank of a room meets somebody and its end is the same everywhere.

Where the layouts are equal a lane moves whole pages. Otherwise pages are cut into *blocks* of equal size that are
contiguous on both sides: all heads of a layer, or as many heads of a layer's keys or values as the greatest common
divisor of the two head counts. Neighbouring blocks travel together where the backend merges them.

Where page sizes differ, one is a multiple of the other, and a larger page counts as so many *parts*, each of the tokens
of a smaller page. A part is no contiguous memory: its blocks are one head's keys or values of these tokens (or
latents), and lie among those of the other parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...common.kvcache.layout import KVLayout


class RankLayout(NamedTuple):
    """One server's half of the comparison: its ranks, and the layout of each."""

    tp_size: int
    layout: KVLayout


@dataclass(frozen=True)
class BlockRange:
    """Blocks ``src [m]`` of a page of our layer group are blocks ``dst [m]`` of a page of the peer's ``dst_group``."""

    src_group: int
    dst_group: int
    src: np.ndarray
    dst: np.ndarray


@dataclass(frozen=True)
class ReshardPlan:
    """``src_blocks[g]`` is how many blocks a page of our group g is cut into, ``dst_blocks`` the same of the peer's;
    ``src_parts`` and ``dst_parts`` how many parts a page has. Pieces name blocks of the first part."""

    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    pieces: tuple[BlockRange, ...]
    src_parts: int = 1
    dst_parts: int = 1

    def pieces_of(self, src_group: int) -> list[BlockRange]:
        return [piece for piece in self.pieces if piece.src_group == src_group]


def expand(part_ids: np.ndarray, blocks: int, offsets: np.ndarray, parts: int = 1) -> np.ndarray:
    """``[n * m]``: blocks ``offsets [m]`` of each of ``part_ids [n]``, where a page has ``blocks`` blocks."""
    if parts == 1:
        within_page: np.ndarray = (part_ids[:, None] * blocks + offsets).reshape(-1)
        return within_page
    pages, part = np.divmod(part_ids[:, None], parts)
    result: np.ndarray = (pages * blocks + offsets * parts + part).reshape(-1)
    return result


def parts_of(page_ids: np.ndarray, parts: int) -> np.ndarray:
    """``[n * parts]``: the parts of pages, in order. Part i of page p has the number ``p * parts + i``."""
    return page_ids if parts == 1 else expand(page_ids, parts, np.arange(parts))


def why_not(prefill: RankLayout, decode: RankLayout) -> str | None:
    """Why no lanes lead from one to the other: the name and both values (decode's first) of what differs."""
    for name in ("form", "head_dim", "dtype"):
        theirs, ours = getattr(prefill.layout, name), getattr(decode.layout, name)
        if ours != theirs:
            return f"{name} of the KV layout is {ours!r} here and {theirs!r} there"
    first, last = prefill.layout.first_layer, prefill.layout.first_layer + prefill.layout.num_layers - 1
    if decode.layout.num_layers != prefill.layout.model_layers or last >= decode.layout.num_layers:
        of_stage = f" ({first} to {last} in this stage)" if prefill.layout.of_layers else ""
        return (f"num_layers of the KV layout is {decode.layout.num_layers} here and {prefill.layout.model_layers} "
                f"there{of_stage}")
    small, large = sorted((prefill.layout.page_size, decode.layout.page_size))
    if large % small:
        return (f"page_size of the KV layout is {decode.layout.page_size} here and {prefill.layout.page_size} there, "
                f"and neither is a multiple of the other")
    for layer in range(first, last + 1):
        theirs, ours = prefill.layout.scales_of(layer - first), decode.layout.scales_of(layer)
        if ours != theirs:
            return (f"the scales of keys and values in layer {layer} are {ours} here and {theirs} there: give both "
                    f"servers the same checkpoint and --quantization-param-path")
        windows = decode.layout.window_of(layer), prefill.layout.window_of(layer - first)
        if windows[0] != windows[1]:
            return f"the sliding window of layer {layer} is {windows[0]} here and {windows[1]} there"
    total = _num_heads(prefill, decode)
    for side in (decode, prefill):
        if not _shares(side, total):
            return (f"num_kv_heads of the KV layout, {decode.layout.num_kv_heads} on each of {decode.tp_size} ranks "
                    f"here and {prefill.layout.num_kv_heads} on each of {prefill.tp_size} ranks there, are not the "
                    f"same heads shared out evenly")
    return None


def writers_of(rank: int, prefill: RankLayout, decode: RankLayout) -> list[int]:
    """The prefill ranks that a decode rank has lanes from; the two sides fit."""
    return sorted(i for i, j in _heads(_shape(prefill), _shape(decode)) if j == rank)


def readers_of(rank: int, prefill: RankLayout, decode: RankLayout) -> list[int]:
    """The decode ranks that a prefill rank has lanes to; the two sides fit."""
    return sorted(j for i, j in _heads(_shape(prefill), _shape(decode)) if i == rank)


def lane(src_rank: int, prefill: RankLayout, dst_rank: int, decode: RankLayout) -> ReshardPlan | None:
    """The lane between two ranks of sides that fit; None where there is none."""
    heads = _heads(_shape(prefill), _shape(decode)).get((src_rank, dst_rank))
    if heads is None:
        return None
    src_heads, dst_heads = prefill.layout.num_kv_heads, decode.layout.num_kv_heads
    src_parts, dst_parts = (side.layout.page_size // min(prefill.layout.page_size, decode.layout.page_size)
                            for side in (prefill, decode))
    same_pages = src_parts == dst_parts
    if src_heads == dst_heads and (same_pages or prefill.layout.form == "latent"):
        # All heads, or none: whole pages, or a block for each layer, or for each part of it.
        src_local = dst_local = np.zeros(1 if heads else 0, np.int64)
        whole = prefill.layout == decode.layout
        src_blocks, dst_blocks = (tuple(1 if whole else layers for layers in side.layout.groups)
                                  for side in (prefill, decode))
    else:
        unit, total = math.gcd(src_heads, dst_heads) if same_pages else 1, _num_heads(prefill, decode)
        units = np.array(sorted(heads)[::unit], dtype=np.int64)
        src_local = _in_layer(units - _first_head(src_rank, prefill, total), src_heads, unit)
        dst_local = _in_layer(units - _first_head(dst_rank, decode, total), dst_heads, unit)
        src_blocks, dst_blocks = (tuple(layers * 2 * side.layout.num_kv_heads // unit for layers in side.layout.groups)
                                  for side in (prefill, decode))
    blocks = [src_blocks, dst_blocks]
    pieces = _pieces(prefill.layout, decode.layout.groups, blocks, src_local, dst_local)
    return ReshardPlan(tuple(n * src_parts for n in src_blocks), tuple(n * dst_parts for n in dst_blocks),
                       tuple(pieces),
                       src_parts, dst_parts)


def _in_layer(heads: np.ndarray, num_heads: int, unit: int) -> np.ndarray:
    """Blocks of a layer, keys first, that begin with these of a rank's heads."""
    return np.concatenate([heads // unit, (heads + num_heads) // unit])


def _pieces(src: KVLayout, dst_groups: tuple[int, ...], blocks: list[tuple[int, ...]], src_local: np.ndarray,
            dst_local: np.ndarray) -> list[BlockRange]:
    """For each pair of groups with layers in common, these layers' blocks."""
    src_groups, pieces, src_start = src.groups, [], src.first_layer
    for g, src_size in enumerate(src_groups):
        dst_start = 0
        for h, dst_size in enumerate(dst_groups):
            layers = np.arange(max(src_start, dst_start), min(src_start + src_size, dst_start + dst_size))
            if blocks[0][g] == 1 and src_groups == dst_groups:  # one block holds all layers of the group
                layers = layers[:1]
            if len(layers) and len(src_local):
                theirs = expand(layers - dst_start, max(1, blocks[1][h] // dst_size), dst_local)
                pieces.append(BlockRange(g, h, expand(layers - src_start, max(1, blocks[0][g] // src_size), src_local),
                                         theirs))
            dst_start += dst_size
        src_start += src_size
    return pieces


Shape = tuple[int, int]  # ranks of a server, and KV heads of each


def _shape(side: RankLayout) -> Shape:
    return side.tp_size, side.layout.num_kv_heads


def _num_heads(prefill: RankLayout, decode: RankLayout) -> int:
    return _told_apart(_shape(prefill), _shape(decode))


def _told_apart(prefill: Shape, decode: Shape) -> int:
    """How many heads to tell apart: the model's, or so many ranges of ranks that hold the same.

    A layout has the heads of one rank only. Replicated ones are a multiple of the model's in all, so the model's number
    is the smaller of two products, and divides both numbers of ranks where either rank has one head.
    """
    if prefill[1] == decode[1] == 1:
        return math.gcd(prefill[0], decode[0])
    return min(ranks * heads for ranks, heads in (prefill, decode))


def _shares(side: RankLayout, total: int) -> bool:
    ranks, heads = _shape(side)
    return ranks * heads == total or (heads == 1 and ranks % total == 0)


def _first_head(rank: int, side: RankLayout, total: int) -> int:
    return rank * total // side.tp_size


@lru_cache(maxsize=64)
def _heads(prefill: Shape, decode: Shape) -> dict[tuple[int, int], frozenset[int]]:
    """``(prefill rank, decode rank)`` of every lane, with the heads that it carries."""
    total = _told_apart(prefill, decode)

    def held(rank: int, shape: Shape) -> range:
        first = rank * total // shape[0]
        return range(first, first + shape[1])

    lanes: dict[tuple[int, int], set[int]] = {}
    for j in range(decode[0]):
        for head in held(j, decode):
            holders = [i for i in range(prefill[0]) if head in held(i, prefill)]
            lanes.setdefault((holders[j % len(holders)], j), set()).add(head)
    for i in range(prefill[0]):
        if all(writer != i for writer, _ in lanes):
            lanes[i, i % decode[0]] = set()
    return {pair: frozenset(heads) for pair, heads in lanes.items()}
