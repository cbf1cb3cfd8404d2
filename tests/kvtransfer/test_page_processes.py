"""Page servers in processes of their own, each with a host tier: tensors arrive as they were, and an owner that is
killed while it is read costs no more than a short wait."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence

import pytest

from baton.common.kvcache.storage.base import Cluster
from baton.common.kvcache.storage.open import open_storage
from baton.common.kvcache.storage.page_servers import PageServers
from baton.tests.common.kvcache.storage.test_host_memory import KEYS, PAGES
from baton.tests.common.kvcache.storage.test_host_memory import Rank as StoredRank
from baton.tests.helpers.stored_pages import DIGEST, query, wait_until


class Rank(StoredRank):
    """Pools and host tier of one rank that reads ``known`` page servers."""

    def __init__(self, known: Sequence[str], rank: int, size: int, groups: tuple[int, ...], latent: bool = False,
                 stall_seconds: float = 10.0, transfer: str = "ipc"):
        self.stall_seconds, self.transfer, self.servers = stall_seconds, transfer, PageServers()
        super().__init__(known, rank, size, groups, latent)

    def open(self, known, shape):
        self.servers.add(known)
        return open_storage("peers", {"stall_seconds": self.stall_seconds}, self.host, DIGEST, shape,
                            cluster=Cluster(self.servers, "secret", self.transfer))

    def sees(self, count: int) -> None:
        wait_until(lambda: len(self.storage._backend._peers.usable) == count)

    def close(self) -> None:
        self.storage.close()
        self.host.close()


def serve(pipe, rank: int, size: int, latent: bool, transfer: str, hangs_at: int | None) -> None:
    """Computes pages and serves them until the pipe is closed; hangs while it reads page ``hangs_at``, and says so."""
    owner = Rank([], rank, size, (2, 3), latent, transfer=transfer)
    read_slot = owner.host.read_slot

    def hanging(key, into):
        if KEYS.index(key) == hangs_at:
            pipe.send("reading")
            time.sleep(60)
        return read_slot(key, into)

    owner.host.read_slot = hanging
    owner.write()
    pipe.send(owner.servers.own)
    try:
        pipe.recv()
    except EOFError:
        owner.close()


@pytest.fixture
def owners():
    started = []

    def start(size: int, latent: bool = False, transfer: str = "ipc", hangs_at: int | None = None):
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, latent, transfer, hangs_at), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        return [(process, pipe, pipe.recv()) for process, pipe in started]

    yield start
    for process, pipe in started:
        pipe.close()
        process.join(20)
        assert process.exitcode is not None


@pytest.mark.parametrize("latent, transfer, writers, readers", [
    (False, "auto", 2, 1), (False, "nixl", 1, 2), (True, "ipc", 1, 2)])
def test_pages_come_from_other_processes(owners, latent, transfer, writers, readers):
    known = [endpoint for *_, endpoint in owners(writers, latent, transfer)]
    ranks = [Rank(known, rank, readers, (1, 1, 3), latent, transfer=transfer) for rank in range(readers)]
    for rank in ranks:
        rank.sees(writers)
        rank.read()
        assert rank.storage.counters.read_pages == PAGES
        rank.close()


def test_an_owner_killed_while_it_is_read_is_left_out(owners):
    (process, pipe, endpoint), = owners(1, hangs_at=3)
    reader = Rank([endpoint], 0, 1, (5,), stall_seconds=1.0)
    reader.sees(1)
    assert query(reader.storage, KEYS) == PAGES
    slots = reader.host.reserve(PAGES)
    read = reader.storage.read(KEYS, slots)
    assert pipe.recv() == "reading"
    process.kill()
    begin = time.monotonic()
    wait_until(lambda: read.done)
    assert read.num_pages == 0 and time.monotonic() - begin < 2.0
    reader.host.unreserve(slots)
    begin = time.monotonic()
    assert query(reader.storage, KEYS) == 0 and time.monotonic() - begin < 0.5  # nobody waits for it again
    assert not reader.storage._backend._peers.usable
    reader.close()
