"""GPU memory of another process, written over CUDA IPC: pages arrive, and a process that dies takes nobody with it.

Both processes are on GPU 0, and on two GPUs where there are two.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch

from baton.kvtransfer.backends.base import WriteState
from baton.kvtransfer.backends.ipc import IpcBackend
from baton.tests.gpu.distributed import ipc_target
from baton.tests.gpu.distributed.ipc_target import PAGE_BYTES, PAGES, region_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONTEXT = multiprocessing.get_context("spawn")


class Target:
    """The other process."""

    def __init__(self, device: int):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=ipc_target.main, args=(device, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.metadata = self.pipe.recv()

    def content(self) -> np.ndarray:
        self.pipe.send("content")
        return np.frombuffer(self.pipe.recv(), np.uint8).reshape(PAGES, PAGE_BYTES)

    def completion_flags(self) -> np.ndarray:
        self.pipe.send("flags")
        return np.frombuffer(self.pipe.recv(), np.int64)


@pytest.fixture(scope="module")
def source():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, generator=generator).cuda(0)


def ended(backend, writes) -> list[WriteState]:
    states, began = {}, time.monotonic()
    while len(states) < len(writes):
        for write in [write for write in writes if id(write) not in states]:
            if (state := backend.poll(write)) is not WriteState.PENDING:
                states[id(write)] = state
        assert time.monotonic() - began < 30, "writes did not end"
    return list(states.values())


def assert_arrives(backend, target, source, blocks: int = 1) -> None:
    rng = np.random.default_rng(blocks)
    src, dst = (rng.permutation(PAGES * blocks)[:PAGES * blocks // 2] for _ in range(2))
    peer = backend.add_peer(target.metadata, [blocks], [blocks])
    expected = target.content().reshape(PAGES * blocks, PAGE_BYTES // blocks).copy()
    assert ended(backend, [backend.write(peer, 0, src, 0, dst)]) == [WriteState.DONE]
    expected[dst] = source.cpu().numpy().reshape(expected.shape)[src]
    assert np.array_equal(target.content().reshape(expected.shape), expected)
    backend.remove_peer(peer)


@pytest.mark.parametrize("device", range(min(2, torch.cuda.device_count())))
@pytest.mark.parametrize("blocks", [1, 256])
def test_blocks_reach_another_process(source, device, blocks):
    backend, target = IpcBackend(), Target(device)
    backend.register([region_of(source)], [PAGES])
    assert_arrives(backend, target, source, blocks)
    target.process.kill()
    backend.close()


def over_and_over(order: str) -> np.ndarray:
    """All pages 64 times, for a copy engine or for the kernel."""
    return np.tile(np.arange(PAGES) if order == "runs" else np.random.default_rng(1).permutation(PAGES), 64)


@pytest.mark.parametrize("order", ["runs", "scattered"])
@pytest.mark.parametrize("device", range(min(2, torch.cuda.device_count())))
def test_a_target_that_is_killed_in_mid_write_harms_nobody(source, device, order):
    """The writer's context stays whole: its writes end, it computes on, and serves the next target."""
    backend, target = IpcBackend(), Target(device)
    backend.register([region_of(source)], [PAGES])
    peer = backend.add_peer(target.metadata, [1], [1])
    ids = over_and_over(order)
    writes = [backend.write(peer, 0, ids, 0, ids) for _ in range(20)]  # 80 GiB
    os.kill(target.process.pid, signal.SIGKILL)
    target.process.join()
    writes += [backend.write(peer, 0, ids, 0, ids) for _ in range(20)]
    assert set(ended(backend, writes[:30])) <= {WriteState.DONE, WriteState.FAILED}
    backend.remove_peer(peer)
    assert backend.poll(writes[-1]) is WriteState.FAILED
    assert int(torch.ones(1 << 20, device="cuda:0").sum()) == 1 << 20
    successor = Target(device)
    assert_arrives(backend, successor, source)
    successor.process.kill()
    backend.close()


@pytest.mark.parametrize("order", ["runs", "scattered"])
def test_a_removed_peer_is_written_no_more(source, order):
    backend, target = IpcBackend(), Target(0)
    backend.register([region_of(source)], [PAGES])
    peer = backend.add_peer(target.metadata, [1], [1])
    ids = over_and_over(order)
    writes = [backend.write(peer, 0, ids, 0, ids) for _ in range(10)]
    backend.remove_peer(peer)
    before = target.content()
    source_before = source.clone()
    source.zero_()
    torch.cuda.synchronize()
    assert np.array_equal(target.content(), before)
    source.copy_(source_before)
    assert all(backend.poll(write) is WriteState.FAILED for write in writes)
    assert_arrives(backend, target, source)  # the same memory, opened again
    target.process.kill()
    backend.close()


def test_writes_that_overlap_all_arrive(source):
    """Runs and scattered blocks, more of them at a time than there are places kept for; the last are the largest."""
    backend, target = IpcBackend(), Target(min(1, torch.cuda.device_count() - 1))
    backend.register([region_of(source)], [PAGES])
    peer, rng, writes = backend.add_peer(target.metadata, [1], [1]), np.random.default_rng(3), []
    expected = target.content().copy()
    for count in (*rng.integers(1, PAGES // 2, 30), PAGES):
        src, dst = (rng.permutation(PAGES)[:count] for _ in range(2))
        if rng.random() < 0.5:
            src, dst = np.arange(count), np.arange(PAGES - count, PAGES)
        expected[dst] = source.cpu().numpy()[src]
        writes.append(backend.write(peer, 0, src, 0, dst))
    assert ended(backend, writes) == [WriteState.DONE] * len(writes)
    assert np.array_equal(target.content(), expected)
    target.process.kill()
    backend.close()


@pytest.mark.parametrize("device", range(min(2, torch.cuda.device_count())))
def test_a_flag_is_written_after_the_pages(source, device):
    backend, target = IpcBackend(), Target(device)
    backend.register([region_of(source)], [PAGES])
    peer, ids = backend.add_peer(target.metadata, [1], [1]), over_and_over("scattered")
    write = backend.write(peer, 0, ids, 0, ids)
    place, began = backend.write_flag(peer, 77), time.monotonic()
    while not target.completion_flags().any():
        assert time.monotonic() - began < 30, "no flag was written"
    assert backend.poll(write) is WriteState.DONE
    assert target.completion_flags()[place] == 77 and np.array_equal(target.content(), source.cpu().numpy())
    backend.write_flag(peer, 78)
    backend.remove_peer(peer)
    assert np.count_nonzero(target.completion_flags()) == 2
    target.process.kill()
    backend.close()


def test_a_peer_in_this_process_is_reached_at_its_own_address(source):
    backend, other = IpcBackend(), IpcBackend()
    pool = torch.zeros_like(source)
    backend.register([region_of(source)], [PAGES])
    other.register([region_of(pool)], [PAGES])
    peer = backend.add_peer(other.local_metadata(), [1], [1])
    torch.cuda.synchronize()
    assert ended(backend, [backend.write(peer, 0, np.array([3, 5]), 0, np.array([1, 0]))]) == [WriteState.DONE]
    assert torch.equal(pool[:2], source[[5, 3]])
    backend.close()
