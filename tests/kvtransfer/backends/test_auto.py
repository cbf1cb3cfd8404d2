"""The backend that is several: each peer by the nearest that reaches it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.common.api.errors import ConfigError, TransferFailed
from baton.kvtransfer.backends.auto import AutoBackend
from baton.kvtransfer.backends.base import Region, WriteState
from baton.kvtransfer.backends.fake import FakeBackend
from baton.kvtransfer.backends.ipc import IpcBackend
from baton.tests.kvtransfer.conftest import make_pool, regions_of, wait_until


def backend_of(pool, kinds=(IpcBackend, FakeBackend)):
    backend = AutoBackend([kind() for kind in kinds])
    backend.register([Region(*region) for region in regions_of(pool)], [len(pages) for pages in pool])
    return backend


@pytest.fixture
def pools():
    return make_pool(seed=1), make_pool()


def moves(source, target, pools, metadata=None) -> str:
    """Copies two pages; returns the name of the backend that copied them."""
    peer = source.add_peer(metadata or target.local_metadata(), [1, 1], [1, 1])
    write = source.write(peer, 0, np.array([3, 4]), 0, np.array([9, 1]))
    wait_until(lambda: source.poll(write) is WriteState.DONE)
    assert np.array_equal(pools[1][0][[9, 1]], pools[0][0][[3, 4]])
    name = write.backend.name
    source.remove_peer(peer)
    return name


def test_a_peer_is_reached_by_the_nearest(pools):
    source, target = map(backend_of, pools)
    assert moves(source, target, pools) == "ipc"
    parts = msgspec.msgpack.decode(target.local_metadata())
    parts["ipc"] = b"of another host"
    pools[1][0][:] = 0
    assert moves(source, target, pools, msgspec.msgpack.encode(parts)) == "fake"
    for backend in (source, target):
        backend.close()


def test_what_cannot_register_the_pool_is_left_out(pools):
    source, target = backend_of(pools[0]), backend_of([pages.copy() for pages in pools[1]])
    assert list(msgspec.msgpack.decode(target.local_metadata())) == ["fake"]
    target.close()
    with pytest.raises(ConfigError, match="shared memory"):
        backend_of([pages.copy() for pages in pools[1]], [IpcBackend])
    for metadata, words in ((msgspec.msgpack.encode({"pigeon": b""}), "travel by pigeon, and ours by ipc, fake"),
                            (b"?", "unreadable")):
        with pytest.raises(TransferFailed, match=words):
            source.add_peer(metadata, [1, 1], [1, 1])
    source.close()


def test_it_is_as_careful_as_the_most_careful_of_its_backends():
    backends = [FakeBackend(), IpcBackend()]
    backends[0].quarantine_seconds, backends[1].progress_interval = 3.0, 0.25
    backend = AutoBackend(backends)
    assert (backend.quarantine_seconds, backend.progress_interval) == (3.0, 0.25)
    backend.close()
