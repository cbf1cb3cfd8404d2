"""Copies scattered blocks of equal size between two memories that a GPU reaches: its own, and a peer's over NVLink.

Copy engines take a command for each block, which costs microseconds whatever the block's size. Here a few programs go
through all of them with vectors of 16 bytes, so that the blocks' addresses make no difference. The number of programs
bounds how many SMs a copy takes from concurrent work.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from .. import reference
from .._triton import runs_triton, tl, triton

PROGRAMS = 64
_TILE_WORDS = 4096
_NUM_WARPS = 16


@triton.jit(do_not_specialize=["src_address", "dst_address", "count", "words"])
def _copy_blocks_kernel(src_address, dst_address, ids_ptr, count, words, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                        EVEN: tl.constexpr, ALIGNED: tl.constexpr, WORD: tl.constexpr):
    """Copies tiles of COLUMNS words of each of ROWS blocks. EVEN: a block's width is a multiple of COLUMNS. ALIGNED: it
    begins at a multiple of 16 bytes, which the compiler cannot know of an address and needs for vectors."""
    src = src_address.to(tl.int64).to(tl.pointer_type(WORD))
    dst = dst_address.to(tl.int64).to(tl.pointer_type(WORD))
    across = tl.cdiv(words, COLUMNS)
    tiles = tl.cdiv(count, ROWS) * across
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < count)[:, None]
        if not EVEN:
            inside = inside & (column < words)[None, :]
        from_block = src + tl.load(ids_ptr + row, row < count, other=0)[:, None] * words
        to_block = dst + tl.load(ids_ptr + count + row, row < count, other=0)[:, None] * words
        if ALIGNED:
            from_block = tl.multiple_of(from_block, (16, 16))
            to_block = tl.multiple_of(to_block, (16, 16))
        tl.store(to_block + column[None, :], tl.load(from_block + column[None, :], inside), inside)


class BlockShape(NamedTuple):
    """The tiling of blocks of one size: ``words`` of ``word_bytes`` each, tiles of ``rows`` blocks by ``columns``."""

    words: int
    word_bytes: int
    rows: int
    columns: int

    @classmethod
    def of(cls, block_bytes: int) -> BlockShape:
        word = 8 if block_bytes % 8 == 0 else 1
        words = block_bytes // word
        columns = min(words & -words, _TILE_WORDS)
        if columns < 128 // word:  # too few neighbours for a warp
            columns = min(triton.next_power_of_2(words), _TILE_WORDS)
        return cls(words, word, _TILE_WORDS // columns, columns)

    def programs_for(self, count: int, most: int = PROGRAMS) -> int:
        """The number of programs that copy ``count`` blocks."""
        tiles = -(-count // self.rows) * -(-self.words // self.columns)
        return max(1, min(tiles, most))

    @property
    def constants(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "EVEN": self.words % self.columns == 0,
                "ALIGNED": self.words * self.word_bytes % 16 == 0, "num_warps": _NUM_WARPS,
                "WORD": tl.int64 if self.word_bytes == 8 else tl.int8}


@functools.lru_cache(maxsize=64)
def compiled(shape: BlockShape, device_index: int) -> Any:
    """Compiles the kernel for blocks of a shape and loads it on a GPU, for callers that launch it by the driver:
    Triton's own launch takes 40 us, and releases the GIL meanwhile.

    Its parameters are two addresses (64 bits), that of the ids, their count and ``shape.words`` (32 bits), and up to
    two addresses of Triton's own that it does not use. Launch it with ``function``, ``metadata.shared`` and
    ``metadata.num_warps`` of the result. One kernel serves every count, and all addresses that are multiples of 16.
    """
    with torch.cuda.device(device_index):
        made = _copy_blocks_kernel.warmup(1 << 40, 1 << 40, torch.int64, 1, shape.words, grid=(1,), **shape.constants)
        made._init_handles()
    assert made.function is not None and made.metadata.num_ctas == 1
    return made


def copy_blocks(src_address: int, dst_address: int, ids: torch.Tensor, block_bytes: int, *,
                programs: int = PROGRAMS) -> None:
    """Copy block ``ids[0, i]`` from ``src_address`` on into block ``ids[1, i]`` from ``dst_address`` on, for all i.

    ``ids`` is [2, n] int64, contiguous, on the device that copies. Both addresses are multiples of 16 bytes. No block
    is written twice, none is read and written.
    """
    assert ids.dtype == torch.int64 and ids.is_contiguous() and src_address % 16 == dst_address % 16 == 0
    if not runs_triton(ids):
        reference.copy_blocks(src_address, dst_address, ids, block_bytes)
        return
    shape = BlockShape.of(block_bytes)
    _copy_blocks_kernel[(shape.programs_for(ids.shape[1], programs),)](
        src_address, dst_address, ids, ids.shape[1], shape.words, **shape.constants)
