"""Checksums that show whether pages arrived as they left: over all of their 64-bit words, or eight of each page.

Each word is multiplied by an odd number of its own, modulo 2**64, so that a changed word always shows. A page's sum is
then scattered together with the page's position in the prompt, so that swapped pages show as well. Sampled words detect
pages that were not written, late, stale or elsewhere, the faults that a transfer has; only ``full`` detects a flipped
bit for certain. This is no defence against forgery.

Cost on a CPU for 512 MiB in two layer groups and pages of 1 MiB, which take 90 ms to send: sampled 0.4 ms on each side
with cold caches, full 50 ms on each side.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .backends.base import Region
from .protocol.messages import Extent
from .protocol.reshard import expand_blocks

SAMPLED_WORDS = 8
_CHUNK_WORDS = 1 << 21  # 16 MiB of pages at a time, which bounds the copy that is made of them
_ODD = np.uint64(0x9E3779B97F4A7C15)


def resolve_extent(choice: Literal["auto", "sampled", "full", "off"], regions: Sequence[Region]) -> Extent:
    """Resolves ``--kv-checksum`` for a pool: with auto host memory is sampled, and GPU memory is not read."""
    if choice == "auto":
        return "sampled" if all(region.device < 0 for region in regions) else "off"
    return choice


def make_checksum(regions: Sequence[Region], num_pages: Sequence[int]) -> Checksum:
    """Makes a Checksum that reads the pools, of ``num_pages`` pages each, in place: with numpy in host memory and torch
    on GPUs."""
    pools = [_host_words(region, count) if region.device < 0 else _gpu_words(region, count)
             for region, count in zip(regions, num_pages)]
    return Checksum(pools)


class Checksum:
    """``pools[g]`` is ``[num_pages, words of a page of layer group g]``, uint64 in numpy or int64 in torch."""

    def __init__(self, pools: Sequence[Any]):
        self._pools = pools

    def compute(self, extent: Extent, group: int, blocks: int, block_ids: np.ndarray, positions: np.ndarray) -> int:
        """Sums blocks ``block_ids [n]`` of a group whose pages have ``blocks`` blocks each; 0 to 2**64 - 1.

        ``positions [n]`` distinguish the blocks of a transfer, see ``block_positions``. The checksums of any partition
        of the blocks add up to the checksum of all (modulo 2**64). ``off`` is 0.
        """
        if extent == "off" or len(block_ids) == 0:
            return 0
        words = self._pools[group]
        words = words.reshape(len(words) * blocks, words.shape[1] // blocks)
        step = max(1, words.shape[1] // SAMPLED_WORDS) if extent == "sampled" else 1
        words = words[:, ::step]
        sums = _numpy_sums(words, block_ids) if isinstance(words, np.ndarray) else _torch_sums(words, block_ids)
        return int(_scatter(sums + positions.astype(np.uint64) * _ODD).sum())


def block_positions(group: int, blocks: int, first: int, count: int, offsets: np.ndarray,
                    per_page: int = 1) -> np.ndarray:
    """``[count * m]``: positions in the prompt, as the receiver cuts it, of blocks ``offsets [m]`` in each of ``count``
    sub-pages from ``first`` on; its pages have ``per_page`` sub-pages and ``blocks`` blocks."""
    return expand_blocks(np.arange(first, first + count), blocks, offsets, per_page) + (group << 48)


def _host_words(region: Region, num_pages: int) -> np.ndarray:
    memory = memoryview((ctypes.c_uint8 * region.num_bytes).from_address(region.address)).cast("B")
    return np.frombuffer(memory, dtype=np.uint64).reshape(num_pages, -1)


class _GpuMemory:
    """Memory that torch does not own, in the form that torch accepts."""

    def __init__(self, region: Region, num_pages: int):
        self.__cuda_array_interface__ = {
            "shape": (num_pages, region.num_bytes // num_pages // 8), "typestr": "<i8", "strides": None,
            "data": (region.address, False), "version": 2}


def _gpu_words(region: Region, num_pages: int) -> Any:
    import torch
    return torch.as_tensor(_GpuMemory(region, num_pages), device=torch.device("cuda", region.device))


def _weights(count: int) -> np.ndarray:
    return (np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * _ODD


def _numpy_sums(words: np.ndarray, page_ids: np.ndarray) -> np.ndarray:
    """``[n]`` uint64: the weighted sum of the words of each page."""
    weights, pages = _weights(words.shape[1]), max(1, _CHUNK_WORDS // words.shape[1])
    return np.concatenate([words[page_ids[start:start + pages]] @ weights
                           for start in range(0, len(page_ids), pages)])


def _torch_sums(words: Any, page_ids: np.ndarray) -> np.ndarray:
    """Computes ``_numpy_sums`` for a tensor, on a stream of its own, so that it waits for no forward pass."""
    import torch
    ids, weights = torch.from_numpy(page_ids), torch.from_numpy(_weights(words.shape[1]).view(np.int64))
    pages = max(1, _CHUNK_WORDS // words.shape[1])
    with _own_stream(words.device):
        ids, weights = ids.to(words.device), weights.to(words.device)
        sums = torch.cat([(words.index_select(0, chunk) * weights).sum(1) for chunk in ids.split(pages)])
        return sums.cpu().numpy().view(np.uint64)


_streams: dict[Any, Any] = {}


def _own_stream(device: Any) -> contextlib.AbstractContextManager[Any]:
    import torch
    if device.type != "cuda":
        return contextlib.nullcontext()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return torch.cuda.stream(_streams[device])


def _scatter(sums: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every bit of the input changes half of the output's."""
    sums = (sums ^ (sums >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    sums = (sums ^ (sums >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = sums ^ (sums >> np.uint64(31))
    return result
