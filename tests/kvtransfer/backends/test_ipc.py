"""The ipc backend on host memory: what it maps, what it refuses, and its cleanup after a peer."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from baton.common.api.errors import ConfigError, TransferFailed
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.common.shared_memory.host import handle_of, map_handle, shared_bytes
from baton.kvtransfer.backends import ipc, ipc_host
from baton.kvtransfer.backends.base import Region, WriteState
from baton.kvtransfer.backends.ipc import IpcBackend

PAGES, PAGE_BYTES = 8, 64


def backend_of(pool: np.ndarray) -> IpcBackend:
    backend = IpcBackend()
    backend.register([Region(pool.ctypes.data, pool.nbytes, -1)], [PAGES])
    return backend


@pytest.fixture
def pools():
    source, target = (shared_bytes(PAGES * PAGE_BYTES).reshape(PAGES, -1) for _ in range(2))
    source[:] = np.arange(PAGES)[:, None] + 1
    return source, target


@pytest.fixture
def pair(pools):
    sender, receiver = map(backend_of, pools)
    yield sender, receiver
    sender.close()


def changed(metadata: bytes, **fields) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(
        msgspec.msgpack.decode(metadata, type=ipc._Metadata), **fields))


def test_a_large_write_goes_on_with_each_poll(pair, pools, monkeypatch):
    monkeypatch.setattr(ipc_host, "_BYTES_PER_POLL", 2 * PAGE_BYTES)
    sender, receiver = pair
    peer = sender.add_peer(receiver.local_metadata(), [1], [1])
    ids = np.array([5, 2, 7, 0, 1])
    write = sender.write(peer, 0, ids, 0, ids[::-1])
    assert [sender.poll(write) for _ in range(3)] == [WriteState.PENDING, WriteState.PENDING, WriteState.DONE]
    source, target = pools
    assert np.array_equal(target[ids[::-1]], source[ids])
    assert not target[[3, 4, 6]].any()


def test_no_write_arrives_once_a_peer_is_removed(pair, pools, monkeypatch):
    monkeypatch.setattr(ipc_host, "_BYTES_PER_POLL", PAGE_BYTES)
    sender, receiver = pair
    peer = sender.add_peer(receiver.local_metadata(), [1], [1])
    write = sender.write(peer, 0, np.array([1, 2]), 0, np.array([1, 2]))
    assert sender.poll(write) is WriteState.PENDING
    sender.remove_peer(peer)
    assert sender.poll(write) is WriteState.FAILED
    assert pools[1][1].any() and not pools[1][2].any()
    with pytest.raises(TransferFailed, match="not connected"):
        sender.write(peer, 0, np.array([1]), 0, np.array([1]))


@pytest.mark.parametrize("fields, words", [
    ({"host": "elsewhere"}, "another host"), ({"regions": [(1, 512, 0)]}, "host memory"),
    ({"handles": [b"?"]}, "cannot be mapped")])
def test_a_peer_out_of_reach_is_a_sentence(pair, fields, words):
    sender, receiver = pair
    with pytest.raises(TransferFailed, match=words):
        sender.add_peer(changed(receiver.local_metadata(), **fields), [1], [1])
    with pytest.raises(TransferFailed, match="unreadable"):
        sender.add_peer(b"?", [1], [1])


def test_memory_that_is_not_shared_is_refused():
    with pytest.raises(ConfigError, match="shared memory"):
        backend_of(np.zeros((PAGES, PAGE_BYTES), np.uint8))


def test_memory_ends_with_its_array():
    array = shared_bytes(4096)
    handle = handle_of(array.ctypes.data + 64, 100)
    array[64:164] = 7
    assert map_handle(handle, 100).tolist() == [7] * 100
    mapped = map_handle(handle, 100)
    del array
    with pytest.raises(OSError):
        os.fstat(handle.fd)
    mapped[:] = 1  # harmless: the memory lives as long as it is mapped
    with pytest.raises(OSError):
        map_handle(handle, 100)


def test_another_file_behind_the_same_number_is_noticed():
    first, second = shared_bytes(64), shared_bytes(64)
    handle, other = (handle_of(array.ctypes.data, 64) for array in (first, second))
    with pytest.raises(OSError, match="another file"):
        map_handle(msgspec.structs.replace(handle, fd=other.fd), 64)
    with pytest.raises(OSError, match="another file"):
        map_handle(handle, 65)


def test_a_shared_pool_is_like_another():
    layout = KVLayout((2, 1), 2, 8, 4, "bfloat16")
    pool, plain = KVPool(layout, 3, "cpu", shared=True), KVPool(layout, 3, "cpu")
    assert [g.shape for g in pool.groups] == [g.shape for g in plain.groups]
    assert all(g.dtype == p.dtype and g.stride() == p.stride() and not g.any()
               for g, p in zip(pool.groups, plain.groups))
    assert all(handle_of(address, size) is not None for address, size, _ in pool.regions())
    assert all(handle_of(address, size) is None for address, size, _ in plain.regions())
