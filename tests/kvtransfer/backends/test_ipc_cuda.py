"""The ipc backend's GPU memory with a driver that copies host memory, as late as the real one may."""

from __future__ import annotations

import ctypes
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.common.api.errors import TransferFailed
from baton.common.shared_memory.cuda import DriverError
from baton.kernels import _triton, reference
from baton.kvtransfer.backends import ipc_cuda
from baton.kvtransfer.backends.base import WriteState
from baton.kvtransfer.backends.cuda_driver import Staging
from baton.kvtransfer.backends.ipc_cuda import CudaMemory, find_runs

BLOCK, BLOCKS = 1 << 20, 24


class SlowDriver:
    """Runs its calls in order, in ``work``."""

    def __init__(self, device: int):
        self.asked, self.happened, self.calls, self.broken = deque(), set(), [], False

    def enter(self) -> None:
        pass

    def stage(self, count: int) -> Staging:
        there = np.full(count, -1)
        return Staging(np.full(count, -1), torch.from_numpy(there), there.ctypes.data)

    def new_event(self) -> object:
        return object()

    def record(self, event: object) -> None:
        self.happened.discard(event)
        self.asked.append(lambda: self.happened.add(event))

    def has_happened(self, event: object) -> bool:
        return event in self.happened

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        self.calls.append(num_bytes)
        self.asked.append(lambda: ctypes.memmove(dst, src, num_bytes))

    def launch(self, kernel: SimpleNamespace, programs: int, pointers: ctypes.Array) -> None:
        if self.broken:
            raise DriverError("out of order")
        self.calls.append("kernel")
        src, dst, ids = (ctypes.c_uint64.from_address(pointers[i]).value for i in range(3))
        count, words = (ctypes.c_int32.from_address(pointers[i]).value for i in (3, 4))
        assert words * 8 == kernel.block_bytes

        def run() -> None:
            table = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(ids)).reshape(2, count)
            reference.copy_blocks(src, dst, torch.from_numpy(table), words * 8)

        self.asked.append(run)

    def map_host(self, address: int, num_bytes: int) -> int:
        if self.broken:
            raise DriverError("out of memory")
        return address

    def write_value(self, address: int, value: int) -> None:
        if self.broken:
            raise DriverError("out of order")
        self.asked.append(lambda: setattr(ctypes.c_int64.from_address(address), "value", value))

    def work(self, steps: int) -> None:
        for _ in range(min(steps, len(self.asked))):
            self.asked.popleft()()

    def synchronize(self) -> None:
        self.work(len(self.asked))


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(ipc_cuda, "Driver", SlowDriver)
    monkeypatch.setattr(ipc_cuda, "_SLOT_IDS", 4)
    monkeypatch.setattr(ipc_cuda, "MIN_RUN_BYTES", 4 * BLOCK)
    monkeypatch.setattr(_triton, "AVAILABLE", True)
    monkeypatch.setattr(ipc_cuda, "compiled",
                        lambda shape, device: SimpleNamespace(block_bytes=shape.words * shape.word_bytes))
    made = CudaMemory(0)
    made.prepare(BLOCK)
    return made


@pytest.fixture
def pools():
    source = np.random.default_rng(1).integers(0, 2**63, (BLOCKS, BLOCK // 8))
    return source, np.zeros_like(source)


def copy(memory, pools, src_ids, dst_ids):
    source, target = pools
    return memory.copy(source.ctypes.data, target.ctypes.data, np.array(src_ids), np.array(dst_ids), BLOCK)


def test_copies_that_overlap_keep_what_each_needs(memory, pools):
    """More of them at a time than there are places for, in runs and scattered, polled while others are in flight."""
    rng, expected, running = np.random.default_rng(2), np.zeros_like(pools[1]), []
    for count in rng.integers(1, 12, 40):
        begin = rng.integers(0, BLOCKS - count, 2)
        src, dst = (np.arange(first, first + count) for first in begin)
        if rng.random() < 0.6:
            src, dst = rng.permutation(BLOCKS)[:count], rng.permutation(BLOCKS)[:count]
        expected[dst] = pools[0][src]
        running.append(copy(memory, pools, src, dst))
        memory._driver.work(rng.integers(0, 6))
        running = [one for one in running if one.poll() is WriteState.PENDING]
    assert running
    memory._driver.work(len(memory._driver.asked))
    assert {one.poll() for one in running} == {WriteState.DONE}
    assert np.array_equal(pools[1], expected)
    assert "kernel" in memory._driver.calls and BLOCK in memory._driver.calls


def test_long_runs_are_left_to_the_copy_engines(memory, pools):
    copy(memory, pools, range(4, 14), range(10, 20))
    copy(memory, pools, [*range(4), *range(8, 12)], [*range(10, 18)])
    assert memory._driver.calls == [10 * BLOCK, 4 * BLOCK, 4 * BLOCK]


def test_runs_are_neighbours_on_both_sides():
    assert find_runs(np.array([3, 4, 5, 9]), np.array([0, 1, 7, 8]), 3) == [(0, 2), (2, 1), (3, 1)]
    assert find_runs(np.array([3, 4, 5, 9]), np.array([0, 1, 7, 8]), 2) is None
    assert find_runs(np.array([3]), np.array([0]), 1) == [(0, 1)]


def test_a_copy_that_cannot_start_leaves_none_in_flight(memory, pools):
    before = copy(memory, pools, [1, 5], [2, 0])
    memory._driver.broken = True
    with pytest.raises(TransferFailed, match="out of order"):
        copy(memory, pools, [7, 3], [4, 9])
    assert not memory._driver.asked and before.poll() is WriteState.DONE
    assert np.array_equal(pools[1][[2, 0]], pools[0][[1, 5]]) and not pools[1][[4, 9]].any()


def test_a_flag_is_written_after_the_copies(memory, pools):
    flags = np.zeros(4, np.int64)
    address = memory.map_flags(flags)
    copy(memory, pools, [1, 5], [2, 0])
    memory.write_flag(address + 16, 77, [])
    memory._driver.work(3)  # ids, kernel, event
    assert not flags.any() and pools[1][2].any()
    memory._driver.work(1)
    assert flags.tolist() == [0, 0, 77, 0]


def test_a_flag_that_cannot_be_mapped_is_reported(memory):
    memory._driver.broken = True
    with pytest.raises(TransferFailed, match="out of memory"):
        memory.map_flags(np.zeros(4, np.int64))
    with pytest.raises(TransferFailed, match="out of order"):
        memory.write_flag(0, 77, [])


def test_settled_copies_have_ended(memory, pools):
    one = copy(memory, pools, [1, 5], [2, 0])
    assert one.poll() is WriteState.PENDING
    memory.wait_for_copies()
    again = copy(memory, pools, [6, 8], [3, 1])
    assert (one.poll(), again.poll()) == (WriteState.DONE, WriteState.PENDING)
