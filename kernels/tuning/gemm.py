"""Chooses kernels and tiles of ``x @ weight.T`` in the type of ``x``.

Few rows (small-M) are bound by reading the weight: every SM has to read all the time. Where rows are many, the tensor
cores' rate and the card's power bound a product, and cuBLAS is taken unless it can be fused with what follows.

The rules were measured on an H200 over the layers of Llama-3-8B and Qwen3-0.6B (``python -m
baton.tests.bench.small_m_matmul --sweep``, ``baton.tests.bench.decode_layer``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..device import DeviceFacts

_CACHED_SHAPES = 4096


@dataclass(frozen=True)
class SmallMTile:
    """One program's part of a product of few rows: ``columns`` outputs by steps of ``depth`` over one of ``splits`` of
    the inner dimension, with ``stages`` steps in flight. ``prefetch_bytes`` of its weights are fetched
    into the L2 cache before the rows are there."""

    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
    prefetch_bytes: int = 0


@dataclass(frozen=True)
class PersistentTile:
    """One tile of a persistent program: ``block`` rows of the weight, which is seen as ``folds`` times as many rows of
    a ``folds``-th of its width, by steps of ``depth``, of which ``stages`` are in flight in each of
    ``programs_per_sm`` programs."""

    block: int
    folds: int
    depth: int
    stages: int
    programs_per_sm: int = 1

    def padded_rows(self, rows: int) -> int:
        """Rows as the tensor cores take them."""
        return max(8, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class SplitKTile:
    """A tile is at most ``rows`` rows by ``weight_rows`` of the weight's, two warp groups' work of ``height`` each, in
    steps of ``depth``, of which ``stages`` are in flight. ``splits`` programs share a tile's inner dimension."""

    rows: int
    height: int
    depth: int
    stages: int
    splits: int = 1

    @property
    def weight_rows(self) -> int:
        return 2 * self.height


@dataclass(frozen=True)
class WarpSpecializedTile:
    """``rows``, 128 or 192, by 256 of the weight's rows; ``stages`` steps at once in shared memory. Programs go through
    ``band`` blocks of rows before the next columns."""

    rows: int
    stages: int
    band: int


class InvariantTile(NamedTuple):
    """A tile of batch_invariant_matmul.py: ``rows`` x ``columns`` by steps of ``depth``, one program for each."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


AnyInvariantTile = InvariantTile | PersistentTile | WarpSpecializedTile | SplitKTile


class BatchedSplits(NamedTuple):
    """A product as cuBLAS's batched one of ``splits`` parts of the inner dimension, which a norm adds up."""

    splits: int


@dataclass(frozen=True)
class SmallMNumbers:
    """``max_rows`` of a weight in 16 bits, of one with ``large_bytes`` that the persistent kernel takes or with
    ``very_large_bytes``, and of a weight in float8: with more rows cuBLAS is faster. ``resident_programs`` run at once:
    more splits would wait. ``stages_by_rows`` are those of a program that has an SM to itself."""

    max_rows: int
    max_rows_of_large: int
    max_rows_of_float8: int
    large_bytes: int
    very_large_bytes: int
    resident_programs: int
    prefetch_bytes: int
    min_steps_per_split: int
    min_steps_per_split_of_large: int
    stages_by_rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PersistentNumbers:
    """``min_bytes`` of a weight, and its ``min_depth``: the small-M kernel is faster with less. ``wide_columns`` give
    each SM more than one tile. ``ring_bytes`` of shared memory are for loads in flight; a tile's end takes the rest.
    Where ``min_busy_sms`` of the SMs have a tile of many rows, more programs gain nothing."""

    min_bytes: int
    min_depth: int
    wide_columns: int
    ring_bytes: int
    min_busy_sms: float = 0.7


@dataclass(frozen=True)
class SplitKNumbers:
    """``min_rows`` to ``max_rows``, ``min_bytes`` of a weight, ``min_steps_per_split`` and the share of the SMs that
    has a tile: less is not worth it."""

    min_rows: int
    max_rows: int
    min_bytes: int
    min_steps_per_split: int
    min_busy_sms: float
    whole: SplitKTile
    shared: SplitKTile


@dataclass(frozen=True)
class BatchedSplitsNumbers:
    """Rows that make two blocks of 128, values of a split's depth, and the share of the SMs that has a tile: less was
    not worth it."""

    min_rows: int
    max_rows: int
    min_depth: int
    min_busy_sms: float


@dataclass(frozen=True)
class WarpSpecializedNumbers:
    """``min_rows`` from which on a pass over a product's result, and the power it takes, is worth saving.
    ``min_used`` of what programs multiply: the rest is padding, or SMs that wait for the last tiles, and with more of
    that cuBLAS and the activation by itself are as fast. ``tall_gain`` of that share is what tall tiles are worth.

    Bands make what some 130 programs read at once about as high as it is wide."""

    min_rows: int
    min_used: float
    tall_gain: float
    tall: WarpSpecializedTile
    usual: WarpSpecializedTile


@dataclass(frozen=True)
class InvariantNumbers:
    """Microseconds in which each SM computes a tile over 4,096 values of the inner dimension, of the kernels that take
    more rows than ``persistent_max_rows``; an SM has one tile at a time. (One H200, 2026-11-23.)"""

    persistent_max_rows: int = 128
    small: float = 21.7
    large: float = 35.4
    usual: float = 43.5
    tall: float = 62.0


INVARIANT_SMALL = InvariantTile(128, 64, 64, 4, 5)
INVARIANT_LARGE = InvariantTile(128, 128, 64, 8, 4)


@dataclass(frozen=True)
class GemmNumbers:
    small_m: SmallMNumbers
    persistent: PersistentNumbers
    split_k: SplitKNumbers
    batched_splits: BatchedSplitsNumbers
    warp_specialized: WarpSpecializedNumbers
    invariant: InvariantNumbers = InvariantNumbers()

    @classmethod
    def derived(cls, facts: DeviceFacts) -> GemmNumbers:
        """The rule for a GPU without measured numbers: bytes and programs grow with its SMs, stages with its shared
        memory."""
        per_sm, shared = 248 << 10, facts.shared_bytes
        stages = tuple((rows, max(2, min(10, shared // ((64 + max(16, rows)) * 256)))) for rows in (16, 32, 64))
        return cls(
            SmallMNumbers(32, 64, 16, per_sm * facts.num_sms, per_sm * facts.num_sms * 3 // 2, 2 * facts.num_sms,
                          16 << 10, 4, 24, stages),
            PersistentNumbers(per_sm * facts.num_sms, 4096, 64 * facts.num_sms, shared - (23 << 10)),
            SplitKNumbers(65, 128, per_sm * facts.num_sms, 8, 0.8, SplitKTile(128, 128, 64, 4),
                          SplitKTile(128, 64, 64, 6)),
            BatchedSplitsNumbers(129, 256, 4096, 0.8),
            WarpSpecializedNumbers(1024, 0.9, 0.03, WarpSpecializedTile(192, 3, 11), WarpSpecializedTile(128, 4, 16)))


@dataclass(frozen=True, eq=False)
class GemmPolicy:
    facts: DeviceFacts
    numbers: GemmNumbers
    batch_invariant: bool = False

    @lru_cache(_CACHED_SHAPES)  # noqa: B019 (policies live as long as the process)
    def invariant(self, rows: int, out: int, width: int, itemsize: int) -> AnyInvariantTile | None:
        """The tile of a product whose rows have the same bits whatever their number; None without ``batch_invariant``,
        and where Triton's kernels do not run.

        Warp groups of a Hopper GPU multiply 16 values of the inner dimension at a time. In one accumulator from first
        to last these have one order of sums, whatever the shape of the tile, and whichever operand the rows are: so
        there the tile follows the number of rows (tests/gpu/kernels/test_invariant_products.py). Elsewhere there is
        one tile."""
        if not self.batch_invariant or not self.facts.runs_triton:
            return None
        if itemsize > 2:
            return InvariantTile(16, 64, 32, 4, 2)
        if not self.facts.runs_gluon or itemsize != 2 or width % 8 or width < 256:
            return InvariantTile(64, 64, 64, 4, 3)
        numbers = self.numbers.invariant
        if rows <= 64:
            return self._persistent_tile(rows, 128 if rows > 32 and self._has_many_columns(out) else 64, 1, 128)
        if rows <= numbers.persistent_max_rows:
            whole = self._whole_tile(out, width)
            return self._persistent_tile(rows, 64, 1, 64) if whole is None else whole
        return min(self.invariant_tiles, key=lambda tile: self._invariant_cost(tile, rows, out))

    @property
    def invariant_tiles(self) -> tuple[AnyInvariantTile, ...]:
        """Those of many rows, on a Hopper GPU."""
        wide = self.numbers.warp_specialized
        return wide.usual, wide.tall, INVARIANT_LARGE, INVARIANT_SMALL

    def _invariant_cost(self, tile: AnyInvariantTile, rows: int, out: int) -> float:
        """Time of one wave of tiles after the other, in which each SM has one."""
        numbers, wide = self.numbers.invariant, self.numbers.warp_specialized
        height, width, cost = {
            wide.usual: (wide.usual.rows, 256, numbers.usual), wide.tall: (wide.tall.rows, 256, numbers.tall),
            INVARIANT_LARGE: (128, 128, numbers.large), INVARIANT_SMALL: (128, 64, numbers.small)}[tile]
        return cost * -(-(-(-rows // height) * -(-out // width)) // self.facts.num_sms)

    @lru_cache(_CACHED_SHAPES)  # noqa: B019 (policies live as long as the process)
    def small_m_max_rows(self, out: int, width: int, itemsize: int) -> int:
        """The most rows for which the small-M kernels are faster than the library, by a weight [out, in]. 0 where they
        do not run, would read no whole vectors, or have no tensor cores for the type."""
        numbers = self.numbers.small_m
        if self.batch_invariant or not self.facts.runs_triton or width * itemsize % 16 or itemsize > 2:
            return 0
        if itemsize == 1:
            return numbers.max_rows_of_float8
        large = out * width * itemsize >= numbers.very_large_bytes or self.is_persistent(out, width, itemsize)
        return numbers.max_rows_of_large if large else numbers.max_rows

    @lru_cache(_CACHED_SHAPES)  # noqa: B019
    def is_persistent(self, out: int, width: int, itemsize: int) -> bool:
        """Says whether the persistent kernel takes products of few rows with such a weight."""
        numbers = self.numbers.persistent
        return (not self.batch_invariant and self.facts.runs_gluon and itemsize == 2
                and out * width * itemsize >= numbers.min_bytes and width >= numbers.min_depth and width % 16 == 0)

    @lru_cache(_CACHED_SHAPES)  # noqa: B019
    def persistent(self, rows: int, out: int, width: int) -> PersistentTile | None:
        """The persistent kernel's tile, None where the small-M kernel is faster. Rows are summed up in two parts, so
        that more programs share the columns. More than 16, each of which comes from the L2 cache once a tile, are
        summed up whole where each SM has a tile of 64 columns, or more than 32 where it has one of 128."""
        if self.batch_invariant or rows > 64:
            return None
        if rows <= 16:
            return self._persistent_tile(rows, 64, 2, 128)
        if out > self.numbers.persistent.wide_columns:
            if rows <= 32:
                return self._persistent_tile(rows, 128, 2, 64)
            return self._persistent_tile(rows, 128, 1, 128) if self._has_many_columns(out) else None
        if self.numbers.persistent.min_busy_sms * self.facts.num_sms <= -(-out // 64) <= self.facts.num_sms:
            return self._persistent_tile(rows, 64, 1, 128)
        return self._persistent_tile(rows, 64, 2, 64)

    def _has_many_columns(self, out: int) -> bool:
        """Says whether each SM has a tile of 128."""
        return out >= 128 * self.facts.num_sms

    def _persistent_tile(self, rows: int, block: int, folds: int, depth: int) -> PersistentTile:
        """A tile with as many steps in flight as the ring holds."""
        tile = PersistentTile(block, folds, depth, 1)
        step_bytes = (block + folds * tile.padded_rows(rows)) * depth * 2
        return replace(tile, stages=self.numbers.persistent.ring_bytes // step_bytes)

    @lru_cache(_CACHED_SHAPES)  # noqa: B019
    def small_m(self, rows: int, out: int, width: int, dtype: torch.dtype) -> SmallMTile:
        """The small-M kernel's tile. It is the same for 2 to 32 rows: a row's result does not depend on the number of
        others. One row by itself has no use for tensor cores, and many narrow columns need no splits."""
        rows = 2 if self.batch_invariant else rows
        if rows == 1 and dtype.itemsize > 1:
            wide = 1 << 14 <= out < 1 << 16 and width >= 2048
            return self._prefetching(SmallMTile(4, 2048, 1, 4, 3) if wide else SmallMTile(8, 1024, 1, 4, 3), out)
        if dtype == torch.float32:
            return SmallMTile(16, 64, 1, 4, 3)
        tile = self._of_some_rows(rows, out, width, dtype)
        step_bytes = (tile.columns + max(16, 1 << (rows - 1).bit_length())) * tile.depth * dtype.itemsize
        return replace(tile, stages=max(2, min(tile.stages, self.facts.shared_bytes // step_bytes)))

    def _of_some_rows(self, rows: int, out: int, width: int, dtype: torch.dtype) -> SmallMTile:
        numbers = self.numbers.small_m
        if dtype.itemsize == 2 and 2 * out * width >= numbers.large_bytes:
            return self._large_small_m(rows, out, width)
        columns, warps = (64, 4) if out > 2048 else (32, 2)
        depth = 256 if dtype.itemsize == 1 else 128
        splits = _splits(out, width, columns, depth, numbers.resident_programs, numbers.min_steps_per_split)
        return self._prefetching(SmallMTile(columns, depth, splits, warps, 4), out)

    def _large_small_m(self, rows: int, out: int, width: int) -> SmallMTile:
        """A tile with as many stages as shared memory holds: the weights of all but two of them are in flight. Where
        there are fewer tiles than SMs each has an SM to itself, and two programs share one where there are more."""
        numbers = self.numbers.small_m
        if -(-out // 64) > self.facts.num_sms:
            return self._prefetching(SmallMTile(64, 128, 1, 4, 4 if rows <= 32 else 3), out)
        splits = _splits(out, width, 64, 128, self.facts.num_sms, numbers.min_steps_per_split_of_large)
        stages = next((stages for most, stages in numbers.stages_by_rows if rows <= most),
                      numbers.stages_by_rows[-1][1])
        tile = SmallMTile(64, 128, splits, 4, stages)
        return self._prefetching(tile, out) if rows <= 32 else tile

    def _prefetching(self, tile: SmallMTile, out: int) -> SmallMTile:
        """Adds a prefetch where all programs begin at once: in one that begins later it is only a second read."""
        numbers, programs = self.numbers.small_m, -(-out // tile.columns) * tile.splits
        return replace(tile, prefetch_bytes=numbers.prefetch_bytes) if programs <= numbers.resident_programs else tile

    @lru_cache(_CACHED_SHAPES)  # noqa: B019
    def split_k(self, rows: int, out: int, width: int, itemsize: int) -> SplitKTile | None:
        """The tile of a product of 65 to 128 rows where there is about one for each SM; None where there is not, or the
        kernel does not run."""
        if not self._takes_split_k(rows, out, width, itemsize):
            return None
        return self._whole_tile(out, width)

    def _whole_tile(self, out: int, width: int) -> SplitKTile | None:
        """The tile of split_k_warp_specialized.py without splits, where about each SM has one and steps are whole."""
        numbers, tiles = self.numbers.split_k, -(-out // self.numbers.split_k.whole.weight_rows)
        busy = numbers.min_busy_sms * self.facts.num_sms <= tiles <= self.facts.num_sms
        return numbers.whole if busy and not width % numbers.whole.depth and not out % 16 else None

    @lru_cache(_CACHED_SHAPES)  # noqa: B019
    def fused_reduce(self, rows: int, out: int, width: int, itemsize: int) -> SplitKTile | BatchedSplits | None:
        """The splits of a product that leaves partial sums to the norm that follows; None where it leaves none."""
        return self._split_k_partials(rows, out, width, itemsize) or self._batched_splits(rows, out, width, itemsize)

    def _split_k_partials(self, rows: int, out: int, width: int, itemsize: int) -> SplitKTile | None:
        if not self._takes_split_k(rows, out, width, itemsize) or out % 64:
            return None
        numbers = self.numbers.split_k
        splits = self.facts.num_sms // -(-out // numbers.shared.weight_rows)
        steps = width // numbers.shared.depth
        whole = splits > 1 and steps >= numbers.min_steps_per_split * splits
        return replace(numbers.shared, splits=splits) if whole else None

    def _batched_splits(self, rows: int, out: int, width: int, itemsize: int) -> BatchedSplits | None:
        """Splits that make about as many tiles of 128 x 128 as SMs. By itself cuBLAS would split too, and make another
        pass over the partial sums."""
        numbers = self.numbers.batched_splits
        takes = numbers.min_rows <= rows <= numbers.max_rows and itemsize == 2 and not out % 8 and not width % 8
        if self.batch_invariant or not takes or not self.facts.is_hopper:
            return None
        tiles, sms = -(-rows // 128) * -(-out // 128), self.facts.num_sms
        splits = sms // tiles
        whole = splits > 1 and width % (8 * splits) == 0 and width >= numbers.min_depth * splits
        return BatchedSplits(splits) if whole and tiles * splits >= numbers.min_busy_sms * sms else None

    def _takes_split_k(self, rows: int, out: int, width: int, itemsize: int) -> bool:
        """Says whether the split-K kernels run, have whole steps, and enough work."""
        numbers = self.numbers.split_k
        return (not self.batch_invariant and numbers.min_rows <= rows <= numbers.max_rows and not width % 64
                and not out % 16 and itemsize == 2 and out * width * itemsize >= numbers.min_bytes
                and self.facts.runs_gluon)

    def fuses_activation(self, out: int, width: int, itemsize: int) -> bool:
        """Says whether products of many rows with a weight [2 * size, in] can end in the activation."""
        return (not self.batch_invariant and self.facts.runs_gluon and itemsize == 2 and width >= 256
                and width % 8 == out % 16 == 0)

    @lru_cache(_CACHED_SHAPES)  # noqa: B019
    def warp_specialized(self, rows: int, out: int, width: int, itemsize: int) -> WarpSpecializedTile | None:
        """For a product of many rows that ends in the activation; None where cuBLAS's, and a kernel for the activation,
        are as fast. The tall tile is taken where nearly as large a share of its work is used."""
        numbers = self.numbers.warp_specialized
        if rows < numbers.min_rows or not self.fuses_activation(out, width, itemsize):
            return None
        tall, usual = (self._used(tile, rows, out // 2) for tile in (numbers.tall, numbers.usual))
        if max(tall, usual) < numbers.min_used:
            return None
        return numbers.tall if tall + numbers.tall_gain >= usual else numbers.usual

    def _used(self, tile: WarpSpecializedTile, rows: int, size: int) -> float:
        """The share of the programs' multiplications that is not padding."""
        tiles, sms = -(-rows // tile.rows) * -(-size // 128), self.facts.num_sms
        return rows * size / (-(-tiles // sms) * sms * tile.rows * 128)

    def adds_residual(self, rows: int) -> bool:
        """Says whether the product itself adds its ``rows`` rows to the residual."""
        return not self.batch_invariant and rows >= self.numbers.warp_specialized.min_rows


def _splits(out: int, width: int, columns: int, depth: int, programs: int, min_steps: int) -> int:
    """The most splits that run at once and have at least ``min_steps`` each."""
    tiles, steps = -(-out // columns), -(-width // depth)
    return max(count for count in (1, 2, 4, 8)
               if count == 1 or (tiles * count <= programs and steps >= min_steps * count))
