"""Plans which bytes travel where prefill and decode differ in tensor-parallel size, layer groups or page size.

A *reshard plan* is for one prefill rank and one decode rank. It covers the heads that the decode rank takes from that
prefill rank, of every layer that the prefill rank has: all layers, or those of its pipeline stage. KV heads are shared
evenly. With more ranks than heads, neighbouring ranks have the same head, and the decode ranks that need it are spread
over the prefill ranks that have it. (Latents are one head, which every rank has.) A prefill rank that no decode rank
needs has a plan without heads, so that every rank of a transfer has a peer and its end is the same everywhere.

Where the layouts are equal, a plan moves whole pages. Otherwise pages are cut into *blocks* of equal size that are
contiguous on both sides: all heads of a layer, or as many heads of a layer's keys or values as the greatest common
divisor of the two head counts. Neighbouring blocks travel together where the backend merges them.

Of each cache group (common/kvcache/cache_group.py) pages travel by a plan of its own; both servers have the same
groups. A plan for several groups numbers their layer groups one after the other. The draft model's pool counts as one
more group, the last.

Where page sizes differ, one is a multiple of the other, and a larger page counts as several *sub-pages*, each with the
tokens of one smaller page. A sub-page is no contiguous memory: its blocks are one head's keys or values of these tokens
(or latents), and lie between those of the other sub-pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...common.kvcache.layout import KVLayout


class RankLayout(NamedTuple):
    """Layout of one server: its tensor-parallel ranks, and the KV layout of each."""

    tp_size: int
    layout: KVLayout


@dataclass(frozen=True)
class BlockRange:
    """Blocks ``src [m]`` of a page of our layer group ``src_group``, and their places ``dst [m]`` in a page of the
    peer's ``dst_group``."""

    src_group: int
    dst_group: int
    src: np.ndarray
    dst: np.ndarray


@dataclass(frozen=True)
class ReshardPlan:
    """The blocks that one prefill rank writes to one decode rank.

    ``src_blocks[g]`` is the number of blocks in a page of our group g, ``dst_blocks`` the same for the peer;
    ``src_subpages`` and ``dst_subpages`` are the numbers of sub-pages in a page. Block ranges name the blocks of a
    page's first sub-page.
    """

    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    ranges: tuple[BlockRange, ...]
    src_subpages: int = 1
    dst_subpages: int = 1

    def ranges_of(self, src_group: int) -> list[BlockRange]:
        return [blocks for blocks in self.ranges if blocks.src_group == src_group]

    def src_block_ids(self, blocks: BlockRange, subpages: np.ndarray) -> np.ndarray:
        """``[n * m]``: ids of a range's blocks in our sub-pages ``subpages [n]``."""
        return expand_blocks(subpages, self.src_blocks[blocks.src_group], blocks.src, self.src_subpages)

    def dst_block_ids(self, blocks: BlockRange, subpages: np.ndarray) -> np.ndarray:
        """``[n * m]``: ids of a range's blocks in the peer's sub-pages ``subpages [n]``."""
        return expand_blocks(subpages, self.dst_blocks[blocks.dst_group], blocks.dst, self.dst_subpages)


def expand_blocks(subpages: np.ndarray, blocks: int, offsets: np.ndarray, per_page: int = 1) -> np.ndarray:
    """``[n * m]``: ids of blocks ``offsets [m]`` in each of ``subpages [n]``; a page has ``blocks`` blocks and
    ``per_page`` sub-pages."""
    ids: np.ndarray
    if per_page == 1:
        ids = subpages[:, None] * blocks + offsets
    else:
        pages, subpage = np.divmod(subpages[:, None], per_page)
        ids = pages * blocks + offsets * per_page + subpage
    return ids.reshape(-1)


def split_pages(page_ids: np.ndarray, per_page: int) -> np.ndarray:
    """``[n * per_page]``: ids of the sub-pages of pages, in order. Sub-page i of page p is ``p * per_page + i``."""
    return page_ids if per_page == 1 else expand_blocks(page_ids, per_page, np.arange(per_page))


def first_read_subpage(layout: KVLayout, num_prompt_tokens: int, subpage_tokens: int) -> int:
    """The first sub-page of a prompt that is read after it; those before it do not travel. Both servers compute it
    alike."""
    return layout.first_retained_token(num_prompt_tokens) // subpage_tokens


def find_mismatch(prefill: RankLayout, decode: RankLayout) -> str | None:
    """Names what keeps pages from travelling between two layouts, with both values (decode's first); None if
    nothing."""
    for name in ("form", "head_dim", "dtype"):
        theirs, ours = getattr(prefill.layout, name), getattr(decode.layout, name)
        if ours != theirs:
            return f"{name} of the KV layout is {ours!r} here and {theirs!r} there"
    theirs, ours = (side.layout.channel_order or "as in the model" for side in (prefill, decode))
    if ours != theirs:
        return (f"the order of keys' channels is {ours} here and {theirs} there: give both servers "
                "--enable-double-sparsity with the same --ds-channel-config-path and --ds-heavy-channel-type, or "
                "neither")
    first, last = prefill.layout.first_layer, prefill.layout.first_layer + prefill.layout.num_layers - 1
    if decode.layout.num_layers != prefill.layout.model_layers or last >= decode.layout.num_layers:
        in_stage = f" ({first} to {last} in this stage)" if prefill.layout.of_layers else ""
        return (f"num_layers of the KV layout is {decode.layout.num_layers} here and {prefill.layout.model_layers} "
                f"there{in_stage}")
    small, large = sorted((prefill.layout.page_size, decode.layout.page_size))
    if large % small:
        return (f"page_size of the KV layout is {decode.layout.page_size} here and {prefill.layout.page_size} there, "
                f"and neither is a multiple of the other")
    if decode.layout.form == "state" and small != large:
        return (f"page_size of the KV layout is {decode.layout.page_size} here and {prefill.layout.page_size} there, "
                "and the states of a hybrid model are those after whole pages: give both servers the same --page-size")
    for layer in range(first, last + 1):
        number, its_number = decode.layout.number_of(layer), prefill.layout.number_of(layer - first)
        if number != its_number:
            return f"layer {number} is here in the cache group of layer {its_number} there"
        theirs, ours = prefill.layout.scales_of(layer - first), decode.layout.scales_of(layer)
        if ours != theirs:
            return (f"the scales of keys and values in layer {number} are {ours} here and {theirs} there: give both "
                    f"servers the same checkpoint and --quantization-param-path")
        windows = decode.layout.window_of(layer), prefill.layout.window_of(layer - first)
        if windows[0] != windows[1]:
            return f"the sliding window of layer {number} is {windows[0]} here and {windows[1]} there"
    total = _num_distinct_heads_of(prefill, decode)
    for side in (decode, prefill):
        if not _shares_evenly(side, total):
            return (f"num_kv_heads of the KV layout, {decode.layout.num_kv_heads} on each of {decode.tp_size} ranks "
                    f"here and {prefill.layout.num_kv_heads} on each of {prefill.tp_size} ranks there, are not the "
                    f"same heads shared out evenly")
    return None


def find_group_mismatch(prefill: Sequence[RankLayout], decode: Sequence[RankLayout]) -> str | None:
    """Does as ``find_mismatch`` for the cache groups of two servers."""
    if len(prefill) != len(decode):
        return (f"the KV cache has {len(decode)} groups of layers here and {len(prefill)} there: give "
                f"--disable-hybrid-swa-memory to both servers or to neither, and the same --context-length")
    return next((why for its, ours in zip(prefill, decode) if (why := find_mismatch(its, ours)) is not None), None)


def writer_ranks(rank: int, prefill: Sequence[RankLayout], decode: Sequence[RankLayout]) -> list[int]:
    """Returns the prefill ranks that write to a decode rank; the layouts match, pool by pool."""
    return sorted({i for its, ours in zip(prefill, decode) for i, j in _head_map(_shape(its), _shape(ours))
                   if j == rank})


def reader_ranks(rank: int, prefill: Sequence[RankLayout], decode: Sequence[RankLayout]) -> list[int]:
    """Returns the decode ranks that a prefill rank writes to; the layouts match, pool by pool."""
    return sorted({j for its, ours in zip(prefill, decode) for i, j in _head_map(_shape(its), _shape(ours))
                   if i == rank})


def make_plan(src_rank: int, prefill: RankLayout, dst_rank: int, decode: RankLayout) -> ReshardPlan | None:
    """Returns the plan between two ranks whose layouts match; None where nothing travels between them."""
    heads = _head_map(_shape(prefill), _shape(decode)).get((src_rank, dst_rank))
    return None if heads is None else _plan_of(heads, src_rank, prefill, dst_rank, decode)


def _plan_of(heads: frozenset[int], src_rank: int, prefill: RankLayout, dst_rank: int,
             decode: RankLayout) -> ReshardPlan:
    """Returns the plan by which ``heads``, possibly none, travel."""
    src_heads, dst_heads = prefill.layout.num_kv_heads, decode.layout.num_kv_heads
    src_subpages, dst_subpages = (side.layout.page_size // min(prefill.layout.page_size, decode.layout.page_size)
                                  for side in (prefill, decode))
    same_pages = src_subpages == dst_subpages
    if src_heads == dst_heads and (same_pages or prefill.layout.form == "latent"):
        # All heads, or none: whole pages, or one block for each layer, or for each layer of a sub-page.
        src_local = dst_local = np.zeros(1 if heads else 0, np.int64)
        whole = prefill.layout == decode.layout
        src_blocks, dst_blocks = (tuple(1 if whole else layers for layers in side.layout.groups)
                                  for side in (prefill, decode))
    else:
        unit, total = math.gcd(src_heads, dst_heads) if same_pages else 1, _num_distinct_heads_of(prefill, decode)
        units = np.array(sorted(heads)[::unit], dtype=np.int64)
        planes = prefill.layout.planes
        src_local = _in_layer(units - _first_head(src_rank, prefill, total), src_heads, unit, planes)
        dst_local = _in_layer(units - _first_head(dst_rank, decode, total), dst_heads, unit, planes)
        src_blocks, dst_blocks = (tuple(layers * planes * side.layout.num_kv_heads // unit
                                        for layers in side.layout.groups) for side in (prefill, decode))
    ranges = _block_ranges(prefill.layout, decode.layout.groups, [src_blocks, dst_blocks], src_local, dst_local)
    return ReshardPlan(tuple(n * src_subpages for n in src_blocks), tuple(n * dst_subpages for n in dst_blocks),
                       tuple(ranges),
                       src_subpages, dst_subpages)


def make_group_plan(src_rank: int, prefill: Sequence[RankLayout], dst_rank: int,
                    decode: Sequence[RankLayout]) -> ReshardPlan | None:
    """Does as ``make_plan`` for all pools of two servers. Where heads of some pools alone travel between two ranks, the
    plan has all layer groups all the same."""
    heads = [_head_map(_shape(its), _shape(ours)).get((src_rank, dst_rank)) for its, ours in zip(prefill, decode)]
    if all(own is None for own in heads):
        return None
    plans = [_plan_of(own or frozenset(), src_rank, its, dst_rank, ours)
             for own, its, ours in zip(heads, prefill, decode)]
    if len(plans) < 2:
        return plans[0]
    ranges: list[BlockRange] = []
    src_groups = dst_groups = 0
    for plan in plans:
        ranges += [replace(blocks, src_group=blocks.src_group + src_groups, dst_group=blocks.dst_group + dst_groups)
                   for blocks in plan.ranges]
        src_groups, dst_groups = src_groups + len(plan.src_blocks), dst_groups + len(plan.dst_blocks)
    src_blocks, dst_blocks = ([blocks for plan in plans for blocks in getattr(plan, side)]
                              for side in ("src_blocks", "dst_blocks"))
    return ReshardPlan(tuple(src_blocks), tuple(dst_blocks), tuple(ranges), plans[0].src_subpages,
                       plans[0].dst_subpages)


def _in_layer(heads: np.ndarray, num_heads: int, unit: int, planes: int) -> np.ndarray:
    """Returns the blocks of a layer, keys first, that begin with these of a rank's heads."""
    return np.concatenate([(heads + plane * num_heads) // unit for plane in range(planes)])


def _block_ranges(src: KVLayout, dst_groups: tuple[int, ...], blocks: list[tuple[int, ...]], src_local: np.ndarray,
                  dst_local: np.ndarray) -> list[BlockRange]:
    """Returns the blocks of common layers for each pair of groups that have any."""
    src_groups, ranges, src_start = src.groups, [], src.first_layer
    for g, src_size in enumerate(src_groups):
        dst_start = 0
        for h, dst_size in enumerate(dst_groups):
            layers = np.arange(max(src_start, dst_start), min(src_start + src_size, dst_start + dst_size))
            if blocks[0][g] == 1 and src_groups == dst_groups:  # one block holds all layers of the group
                layers = layers[:1]
            if len(layers) and len(src_local):
                dst_ids = expand_blocks(layers - dst_start, max(1, blocks[1][h] // dst_size), dst_local)
                src_ids = expand_blocks(layers - src_start, max(1, blocks[0][g] // src_size), src_local)
                ranges.append(BlockRange(g, h, src_ids, dst_ids))
            dst_start += dst_size
        src_start += src_size
    return ranges


Shape = tuple[int, int]
"""Number of a server's ranks, and KV heads of each."""


def _shape(side: RankLayout) -> Shape:
    return side.tp_size, side.layout.num_kv_heads


def _num_distinct_heads_of(prefill: RankLayout, decode: RankLayout) -> int:
    return _num_distinct_heads(_shape(prefill), _shape(decode))


def _num_distinct_heads(prefill: Shape, decode: Shape) -> int:
    """Counts the heads that differ: the model's, or one for each range of ranks with the same heads.

    A layout has the heads of one rank only. With replicas the total is a multiple of the model's number, so that number
    is the smaller of the two totals, and divides both numbers of ranks where either rank has one head.
    """
    if prefill[1] == decode[1] == 1:
        return math.gcd(prefill[0], decode[0])
    return min(ranks * heads for ranks, heads in (prefill, decode))


def _shares_evenly(side: RankLayout, total: int) -> bool:
    ranks, heads = _shape(side)
    return ranks * heads == total or (heads == 1 and ranks % total == 0)


def _first_head(rank: int, side: RankLayout, total: int) -> int:
    return rank * total // side.tp_size


@lru_cache(maxsize=64)
def _head_map(prefill: Shape, decode: Shape) -> dict[tuple[int, int], frozenset[int]]:
    """Maps each ``(prefill rank, decode rank)`` that has a plan to the heads that travel."""
    total = _num_distinct_heads(prefill, decode)

    def heads_of(rank: int, shape: Shape) -> range:
        first = rank * total // shape[0]
        return range(first, first + shape[1])

    pairs: dict[tuple[int, int], set[int]] = {}
    for j in range(decode[0]):
        for head in heads_of(j, decode):
            owners = [i for i in range(prefill[0]) if head in heads_of(i, prefill)]
            pairs.setdefault((owners[j % len(owners)], j), set()).add(head)
    for i in range(prefill[0]):
        if all(writer != i for writer, _ in pairs):
            pairs[i, i % decode[0]] = set()
    return {pair: frozenset(heads) for pair, heads in pairs.items()}
