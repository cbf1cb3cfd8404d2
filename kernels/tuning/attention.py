"""Chooses tiles of attention over pages, and how a decode step's keys are split among programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from .._triton import LOADS_PASS_STORES
from ..device import DeviceFacts


class DecodeTile(NamedTuple):
    """``tokens`` of one iteration, and how the compiler is to pipeline the loop. ``prefetched`` tiles are fetched into
    the L2 cache while the previous kernel runs. ``waits_late``: where attention takes the step's own keys and values
    itself, its loop begins before that kernel has ended, at the cost of registers."""

    tokens: int = 64
    warps: int = 4
    stages: int = 2
    prefetched: int = 1
    waits_late: bool = False


class PrefillTile(NamedTuple):
    """``tokens`` of keys and values in one iteration."""

    tokens: int
    warps: int = 8
    stages: int = 2


class VerifyTile(NamedTuple):
    """``rows`` of a request, each with all query heads of a KV head, are a program's; ``tokens`` of one iteration.
    ``prefetched`` tiles are fetched into the L2 cache while the previous kernel runs. With latents a program takes
    ``heads`` of all; ``transposed``: tokens are then the rows of products, and query rows their columns.
    ``warp_specialized``: mla_verify_warp_specialized.py's kernel runs where it takes the pages."""

    rows: int
    tokens: int = 64
    warps: int = 4
    stages: int = 2
    prefetched: int = 1
    heads: int = 64
    transposed: bool = False
    warp_specialized: bool = False

    def head_blocks(self, num_heads: int) -> int:
        return -(-num_heads // self.heads)


class DecodeSplits(NamedTuple):
    """Parameters of ``plan_decode``: splits for about ``programs_per_sm`` programs, of ``min_tokens`` tokens at least,
    and up to ``max_rounds`` times as many where lengths are mixed.

    Two programs fit an SM; four rounds of them leave an eighth of a round idle at the end, on average. A shorter
    split's start-up and merge cost more than what it takes off the others."""

    programs_per_sm: int = 8
    min_tokens: int = 256
    max_rounds: int = 1


class FixedSplitTile(NamedTuple):
    """The tile of fixed_split_attention.py: ``rows`` (tokens and heads of a group) by ``tokens`` of keys. Where rows
    are few, about ``programs_per_sm`` programs share all splits; ``prefetched`` tiles of each are fetched into the L2
    cache while the previous kernel runs."""

    rows: int
    tokens: int
    warps: int
    stages: int = 2
    prefetched: int = 1
    programs_per_sm: int = 4


INVARIANT_SPLITS = DecodeSplits(8, 256, 0)
"""Without rounds each request is cut by its own length alone, into ``programs_per_sm`` splits at most."""


@dataclass(frozen=True)
class AttentionNumbers:
    """``few_kv_heads`` of all requests give the SMs two programs each at most: longer splits, of which more is on its
    way, then take less than four programs to an SM. The tiles of ``wide`` heads and of float32 are as large as
    registers, or the shared memory of more than one program, hold.

    Steps of up to ``verify_max_rows`` rows a request are those of drafts, by tiles of ``verify_tile_rows`` at most.

    ``mla_wide``: each latent is found by an index that is loaded before it, and only from 5 stages on the compiler
    (Triton 3.6) has a second tile in flight while one is computed. Two programs of ``mla_narrow``, of 16 heads, fit an
    SM of an H100 or H200; of their 3 tiles one is computed."""

    few_kv_heads: int
    per_head_max_rows: int = 256
    mla_max_heads: int = 64
    usual: DecodeTile = field(default_factory=DecodeTile)
    few: DecodeTile = DecodeTile(64, 4, 3, 2, LOADS_PASS_STORES)
    float8: DecodeTile = DecodeTile(64, 4, 3)
    wide: DecodeTile = DecodeTile(32, 4, 3)
    float32: DecodeTile = DecodeTile(32, 4, 2)
    mla_narrow: DecodeTile = DecodeTile(32, 4, 3)
    mla_wide: DecodeTile = DecodeTile(32, 8, 5)
    mla_float32: DecodeTile = DecodeTile(16, 4, 2)
    verify_max_rows: int = 16
    verify_tile_rows: int = 64

    @classmethod
    def derived(cls, facts: DeviceFacts) -> AttentionNumbers:
        """The rule for a GPU without measured numbers: the widest tile, DeepSeek's latents of 576 values, has as many
        stages as its shared memory holds."""
        stages = max(2, min(5, facts.shared_bytes // (32 * 576 * 2)))
        return cls(2 * facts.num_sms, mla_wide=DecodeTile(32, 8, stages))


@dataclass(frozen=True, eq=False)
class AttentionPolicy:
    facts: DeviceFacts
    numbers: AttentionNumbers
    batch_invariant: bool = False

    @lru_cache(4096)  # noqa: B019 (policies live as long as the process)
    def decode(self, dim: int, itemsize: int, cache_itemsize: int, kv_heads: int) -> DecodeTile:
        """The tile for queries of ``dim`` values of ``itemsize`` bytes, pages of ``cache_itemsize``, and ``kv_heads``
        of all requests together."""
        if itemsize > 2:
            return self.numbers.float32
        if dim > 128:
            return self.numbers.wide
        if cache_itemsize == 1:
            return self.numbers.float8
        few = kv_heads <= self.numbers.few_kv_heads and not self.batch_invariant
        return self.numbers.few if few else self.numbers.usual

    def stores_current_kv(self, dim: int, itemsize: int, cache_itemsize: int, kv_heads: int) -> bool:
        """Says whether attention itself stores the step's own keys and values faster than ``rope_and_store`` before it:
        where the loop's registers leave space for that. At 64 requests of 8 heads it gains nothing."""
        return cache_itemsize == itemsize and self.decode(dim, itemsize, cache_itemsize, kv_heads).waits_late

    @lru_cache(4096)  # noqa: B019
    def decode_splits(self, dim: int, itemsize: int, cache_itemsize: int, kv_heads: int) -> DecodeSplits:
        """As many splits as programs that run at once, and twice that for mixed lengths."""
        if self.batch_invariant:
            return INVARIANT_SPLITS
        if dim > 128 or itemsize > 2:
            return DecodeSplits()
        few = cache_itemsize > 1 and kv_heads <= self.numbers.few_kv_heads
        return DecodeSplits(2 if few else 4, 128, 2)

    def decode_warp_specialized(self, kv_heads: int) -> bool:
        """Says whether the warp-specialized kernel is faster for ``kv_heads`` of all requests."""
        return not self.batch_invariant and self.facts.runs_gluon and kv_heads > self.numbers.few_kv_heads

    def fixed_split(self, dim: int, itemsize: int, cache_itemsize: int, rows: int) -> FixedSplitTile:
        """The tile of up to ``rows`` (tokens and heads of a group) of each request. All of them have the same tokens,
        and a row's bits are the same in each (tests/gpu/kernels/test_fixed_splits.py). Keys in float8 are multiplied in
        another order by tiles of fewer rows than a warp group of a Hopper GPU takes."""
        if itemsize > 2:
            return FixedSplitTile(16, 32, 4)
        wide = dim > 128
        if not self.facts.is_hopper:
            return FixedSplitTile(64, 32, 8) if wide else FixedSplitTile(64, 64, 4)
        if rows <= 32 and cache_itemsize == itemsize:
            return FixedSplitTile(16 if rows <= 16 else 32, 32 if wide else 64, 4, 3)
        if wide:
            return FixedSplitTile(64, 32, 8)
        return FixedSplitTile(64, 64, 4) if rows <= 64 else FixedSplitTile(128, 64, 8, 3)

    def verifies(self, max_q_len: int) -> bool:
        """Says whether verify_attention.py's kernel computes a step of up to ``max_q_len`` causal rows a request."""
        return max_q_len <= self.numbers.verify_max_rows

    def verify(self, group: int, q_len: int, dim: int, itemsize: int, cache_itemsize: int,
               kv_heads: int) -> VerifyTile:
        """The tile of up to ``q_len`` rows of ``group`` query heads a KV head, for ``kv_heads`` of all requests
        together; it has ``verify_tile_rows`` rows and heads at most. Tiles of 16 rows, which are whole, are computed
        soonest after their keys have come; of others more keys are to be on their way. Keys in float8 become those of
        wider types in each warp that multiplies them: two warps convert less than four."""
        decode = self.decode(dim, itemsize, cache_itemsize, kv_heads)
        if self.batch_invariant:
            return VerifyTile(1, *decode[:4])
        most = self.numbers.verify_tile_rows if dim <= 128 and itemsize <= 2 else 32
        tile = VerifyTile(max(1, most // group), *decode[:4])
        rows = group * min(tile.rows, 1 << (q_len - 1).bit_length())
        if decode is self.numbers.usual:
            return tile._replace(stages=4 if rows < 16 else tile.stages if rows == 16 else 3)
        if decode is self.numbers.float8:
            return tile._replace(tokens=128, stages=2) if rows <= 16 else tile._replace(tokens=32, warps=2)
        return tile

    def per_head_rows(self, rows: int) -> int | None:
        """Rows of a program of per_head_matmul.py; None where torch multiplies more ``rows`` faster."""
        if self.batch_invariant:
            return 64
        if rows > self.numbers.per_head_max_rows:
            return None
        return 16 if rows <= 16 else 32 if rows <= 32 else 64

    def prefill(self, row_bytes: int, itemsize: int) -> PrefillTile:
        """For heads of ``row_bytes``: with 64 tokens of wider ones (256 values) registers would spill."""
        tokens = 64 if row_bytes <= 256 else 32
        # float32 has no tensor cores: the product's operands spill seven times as many registers.
        return PrefillTile(tokens // 2 if itemsize > 2 else tokens)

    def mla_prefill(self, itemsize: int) -> PrefillTile:
        return PrefillTile(64 if itemsize <= 2 else 16)

    def mla_head_block(self, num_heads: int, itemsize: int) -> int:
        """Heads that one program takes: 64 of them read each latent once for all; in float32 only 16 fit."""
        padded = 1 << (num_heads - 1).bit_length()
        return max(16, min(self.numbers.mla_max_heads if itemsize <= 2 else 16, padded))

    def mla_decode(self, num_heads: int, itemsize: int) -> DecodeTile:
        if itemsize > 2:
            return self.numbers.mla_float32
        return self.numbers.mla_narrow if self.mla_head_block(num_heads, itemsize) <= 16 else self.numbers.mla_wide

    def mla_is_narrow(self, num_heads: int, itemsize: int) -> bool:
        """Says whether mla_decode_narrow.py's kernel runs, which is for few heads and needs 16-bit tensor cores."""
        return num_heads <= 16 and itemsize <= 2

    def mla_splits(self, num_heads: int, itemsize: int) -> DecodeSplits:
        """As many splits as programs that run at once, and short ones where requests are few."""
        if self.batch_invariant:
            return INVARIANT_SPLITS
        return DecodeSplits(2, 64) if self.mla_is_narrow(num_heads, itemsize) else DecodeSplits()

    def mla_verify(self, num_heads: int, q_len: int, itemsize: int) -> VerifyTile:
        """The tile of up to ``q_len`` rows of ``num_heads`` heads over latents: 64 rows and heads at most. Of up to 32
        two programs fit an SM. Whole tiles of 64 are computed by warp groups: of 64 requests 4 rows of 16 heads take
        78 us in place of 134, and one row of 128 heads 126 in place of mla_decode's 318 (one H200)."""
        if itemsize > 2:
            tile = self.numbers.mla_float32
            return VerifyTile(1 if self.batch_invariant else max(1, 16 // num_heads), *tile[:3], heads=16)
        heads = min(num_heads, 64)
        if self.batch_invariant:
            return VerifyTile(1, 32, 8, 4 if heads > 32 else 5, heads=heads, transposed=heads <= 32)
        rows = max(1, 64 // num_heads)
        if min(rows, 1 << (q_len - 1).bit_length()) * heads <= 32:
            return VerifyTile(rows, 64, 4, 2, heads=heads)
        return VerifyTile(rows, 32, 8, 4, heads=heads, warp_specialized=self.facts.runs_gluon and rows * heads == 64)

    def mla_verify_splits(self, tile: VerifyTile) -> DecodeSplits:
        """As many splits of verified rows as programs that run at once."""
        if self.batch_invariant:
            return INVARIANT_SPLITS
        return DecodeSplits(1 if tile.warp_specialized else 2, 64)
