"""Page servers of ranks in this process: what is found, fetched, refused and left out."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import zmq

from baton.common.api.errors import ConfigError
from baton.common.kvcache.storage.base import Cluster, StorageContext
from baton.common.kvcache.storage.objects import ObjectFormat
from baton.common.kvcache.storage.open import open_storage
from baton.common.kvcache.storage.page_servers import PageServers
from baton.kvtransfer.pages import messages as m
from baton.kvtransfer.pages.peers import Link, endpoint_of
from baton.kvtransfer.protocol.authentication import make_secret
from baton.tests.helpers.ports import free_port
from baton.tests.helpers.stored_pages import DIGEST, FakeHost, key_of, query, rank_shape, read_back, wait_until

KEYS = [key_of(i) for i in range(24)]


class Rank:
    """A rank's host memory with the storage ``peers``; ``knows``: other ranks."""

    def __init__(self, rank=0, size=1, *, digest=DIGEST, knows=(), secret=None, transfer="ipc", stall=5.0, latent=False,
                 address="127.0.0.1", **options):
        shape = rank_shape(rank, size, latent=latent)
        self.host, self.servers = FakeHost(shape), PageServers()
        self.servers.add(other.servers.own for other in knows)
        self.storage = open_storage("peers", {"stall_seconds": stall, **options}, self.host, digest, shape,
                                    address=address, cluster=Cluster(self.servers, secret, transfer))
        self.backend, self.closed = self.storage._backend, False

    def sees(self, count: int) -> None:
        wait_until(lambda: len(self.backend._peers.usable) == count)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.storage.close()


@pytest.fixture
def ranks():
    made = []

    def make(*args, **kwargs):
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def count_writes(rank) -> list[int]:
    """The numbers of blocks of writes into this rank's peers."""
    sizes, write = [], rank.backend._transfer.write

    def counted(peer, group, ids, *args):
        sizes.append(len(ids))
        return write(peer, group, ids, *args)

    rank.backend._transfer.write = counted
    return sizes


@pytest.mark.parametrize("transfer", ["ipc", "fake", "none"])
def test_pages_come_from_a_peer(ranks, transfer):
    """Written into the reader's memory, or as messages where there is no backend for that."""
    owner = ranks(transfer=transfer)
    reader = ranks(knows=[owner], transfer=transfer)
    sizes = [] if transfer == "none" else count_writes(owner)
    owner.host.add(KEYS[:20])
    reader.sees(1)
    assert query(reader.storage, KEYS) == 20
    assert read_back(reader.storage, reader.host, KEYS[:20]) == 20
    assert (sum(sizes) >= 20) == (transfer != "none")
    assert reader.storage.counters.read_pages == 20 and reader.storage.read_rate > 0
    owner.sees(1)  # it was told of the reader by the reader alone
    reader.host.add(KEYS[20:])
    assert query(owner.storage, KEYS[20:]) == 4 and read_back(owner.storage, owner.host, KEYS[20:]) == 4
    assert owner.storage.num_queued_writes == owner.storage.counters.written_pages == 0


def test_what_has_left_host_memory_is_not_found(ranks):
    owner = ranks()
    reader = ranks(knows=[owner])
    owner.host.add(KEYS[:6])
    reader.sees(1)
    assert query(reader.storage, KEYS[:6]) == 6
    owner.host.drop(KEYS[3:5])
    assert query(reader.storage, KEYS[:6]) == 3
    assert read_back(reader.storage, reader.host, KEYS[:6]) == 3  # without a query, and after one that found more
    owner.host.read_slot = lambda key, into: False  # evicted while it is read
    assert read_back(reader.storage, reader.host, KEYS[5:6]) == 0
    assert reader.storage.counters.errors == dict.fromkeys(reader.storage.counters.errors, 0)


@pytest.mark.parametrize("transfer", ["ipc", "none"])
def test_ranks_of_another_number_read_each_other(ranks, transfer):
    """Two ranks join the objects of four, one those of two; four cut theirs out of two's."""
    pair = [ranks(rank, 2, transfer=transfer) for rank in range(2)]
    for rank in pair:
        rank.host.add(KEYS[:8])
    alone = ranks(knows=pair, transfer=transfer)
    alone.sees(2)
    assert query(alone.storage, KEYS) == 8 and read_back(alone.storage, alone.host, KEYS[:8]) == 8
    alone.host.add(KEYS[8:12])
    for rank in pair:
        rank.sees(1)  # nothing of the other rank's is of use to it
        assert query(rank.storage, KEYS[8:]) == 4 and read_back(rank.storage, rank.host, KEYS[8:12]) == 4
    four = [ranks(rank, 4, knows=pair, transfer=transfer) for rank in range(4)]
    for rank in four:
        assert rank.storage._objects.shape.tp_size == 4
        wait_until(lambda rank=rank: query(rank.storage, KEYS[:8]) == 8)
        assert read_back(rank.storage, rank.host, KEYS[:8]) == 8


def test_peers_learn_each_others_peers(ranks):
    first = ranks()
    second, third = ranks(knows=[first]), ranks(knows=[first])
    for rank in (first, second, third):
        rank.sees(2)
    third.host.add(KEYS[:4])
    second.host.add(KEYS[4:8])
    assert query(second.storage, KEYS[:4]) == 4 and read_back(second.storage, second.host, KEYS[:4]) == 4
    assert query(first.storage, KEYS[:8]) == 8 and read_back(first.storage, first.host, KEYS[:8]) == 8  # of two peers


def test_a_server_on_all_addresses_is_found_at_the_one_it_comes_from(ranks):
    owner = ranks()
    reader = ranks(knows=[owner], address="0.0.0.0")
    reader.host.add(KEYS[:2])
    owner.sees(1)
    assert owner.backend._peers.usable[0].endpoint == reader.servers.own.replace("0.0.0.0", "127.0.0.1")
    assert query(owner.storage, KEYS[:2]) == 2


def test_what_is_no_endpoint_is_passed_over(ranks):
    owner, reader = ranks(), ranks()
    reader.servers.add(["nowhere", "tcp://127.0.0.1:0", "ipc:///no/such/folder"])
    reader.servers.add([owner.servers.own])
    reader.sees(1)


def test_configured_peers_are_reached_and_ourselves_are_not(ranks):
    ports = [free_port(), free_port()]
    options = {"peers": [f"127.0.0.1:{port}" for port in ports]}  # the same for all
    first, second = (ranks(port=port, **options) for port in ports)
    first.host.add(KEYS[:2])
    second.sees(1)
    first.sees(1)
    assert query(second.storage, KEYS[:2]) == 2 and read_back(second.storage, second.host, KEYS[:2]) == 2
    with pytest.raises(ConfigError, match="takes HOST:PORT, not here"):
        Rank(peers=["here"])
    with pytest.raises(ConfigError, match=f"port {ports[0]}"):
        Rank(port=ports[0])


def test_another_model_is_not_asked_and_its_pages_are_not_used(ranks, monkeypatch):
    other = ranks(digest="ff" * 16)
    reader = ranks(knows=[other])
    other.host.add(KEYS[:4])
    wait_until(lambda: other.servers.own in reader.servers.reached)
    assert not reader.backend._peers.usable and query(reader.storage, KEYS[:4]) == 0
    # One that lies about what it has, and then even about the name.
    liar = other.backend._server
    monkeypatch.setattr(liar, "holds", reader.backend._server.holds)
    for peer in reader.backend._peers._peers.values():
        peer.due = 0.0
    reader.sees(1)
    assert query(reader.storage, KEYS[:4]) == 4 and read_back(reader.storage, reader.host, KEYS[:4]) == 0
    assert reader.storage.counters.errors["foreign"] > 0


@pytest.mark.parametrize("transfer", ["ipc", "none"])
def test_damaged_pages_are_not_used(ranks, transfer, monkeypatch):
    owner = ranks(transfer=transfer)
    reader = ranks(knows=[owner], transfer=transfer)
    owner.host.add(KEYS[:6])
    seal = ObjectFormat.seal

    def damaged(objects, key, data):
        seal(objects, key, data)
        if key == KEYS[3]:
            data[700] ^= 1

    monkeypatch.setattr(ObjectFormat, "seal", damaged)
    reader.sees(1)
    assert query(reader.storage, KEYS[:6]) == 6 and read_back(reader.storage, reader.host, KEYS[:6]) == 3
    assert reader.storage.counters.errors["corrupt"] == 1


def test_servers_with_another_secret_are_refused(ranks, caplog):
    owner, reader = ranks(secret="ours"), None
    stranger, nobody = ranks(secret="theirs", knows=[owner]), ranks(knows=[owner])
    reader = ranks(secret="ours", knows=[owner])
    owner.host.add(KEYS[:2])
    reader.sees(1)
    assert query(reader.storage, KEYS[:2]) == 2 and read_back(reader.storage, reader.host, KEYS[:2]) == 2
    assert query(stranger.storage, KEYS[:2]) == query(nobody.storage, KEYS[:2]) == 0
    owner.sees(1)
    assert "not authenticated with our --cluster-secret" in caplog.text


def test_a_peer_that_hangs_is_left_out_after_one_short_wait(ranks, caplog):
    owner, other = ranks(), ranks()
    reader = ranks(knows=[owner, other], stall=1.0)
    owner.host.add(KEYS[:2])
    other.host.add(KEYS[2:4])
    reader.sees(2)
    io, hangs, released = owner.backend._server._io, threading.Event(), threading.Event()
    work = io._work

    def hang(stalled):
        hangs.set()
        released.wait(30)
        return work(stalled)

    io._work = hang
    io.wake()
    assert hangs.wait(10)
    begin = time.monotonic()
    assert reader.backend.exists([owner.storage._objects.name(key, owner.storage._objects.shape.own)
                                  for key in KEYS[:4]]) == [False, False, True, True]
    assert 0.5 <= time.monotonic() - begin < 1.0
    assert "does not answer: its pages are computed here" in caplog.text
    assert [peer.endpoint for peer in reader.backend._peers.usable] == [other.servers.own]  # nobody waits for it again
    assert query(reader.storage, KEYS[2:4]) == 2 and reader.storage.healthy
    released.set()
    wait_until(lambda: query(reader.storage, KEYS[:4]) == 4)  # it is back


def test_a_restarted_peer_is_introduced_to_again(ranks):
    port = free_port()
    first = ranks(port=port)
    reader = ranks(knows=[first])
    first.host.add(KEYS[:4])
    reader.sees(1)
    assert query(reader.storage, KEYS[:2]) == 2
    first.close()
    second = ranks(port=port)
    second.host.add(KEYS[:4])
    # It knows nothing of the reader's memory, and says so.
    wait_until(lambda: read_back(reader.storage, reader.host, KEYS[2:4]) == 2)
    assert reader.storage.healthy


@pytest.mark.parametrize("secret", [None, "ours"])
def test_garbage_does_no_harm(ranks, secret):
    owner = ranks(secret=secret)
    owner.host.add(KEYS[:1])
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(owner.servers.own)
    for frames in ([b""], [b"\xff" * 100], [b"a", b"b"], [b"x"] * 3):
        raw.send_multipart(frames)
    link = Link(context, owner.servers.own, make_secret(secret))
    name = owner.storage._objects.name(KEYS[0], owner.storage._objects.shape.own)
    size = owner.storage._objects.num_bytes(owner.storage._objects.shape.own)
    for message in (m.Introduce(7, "x", "nowhere", b"?", 1, 1), m.Introduce(m.VERSION, "x", "", b"?", 9, 64 << 10),
                    m.Fetch(1, "x", [name], size, np.array([5], "<i4").tobytes()),
                    m.Fetch(2, "x", [name, "?", name[:10] + "zz" + name[12:]], size, b""),
                    m.Fetch(3, "x", [name], 5, b""), m.Find(4, [name, "", "é" * 80])):
        link.send(message)
    answers = []

    def hear() -> bool:
        if (message := link.receive()) is not None:
            answers.append(message)
        return bool(answers) and getattr(answers[-1], "number", 0) == 3

    wait_until(hear)
    assert m.Unknown(1) in answers and m.Fetched(2, b"\1\0\0") in answers and m.Fetched(3, b"\0") in answers
    assert m.Found(4, b"\1\0\0") in answers
    assert sum(isinstance(each, m.Part) for each in answers) == -(-size // (1 << 20))
    reader = ranks(knows=[owner], secret=secret)
    reader.sees(1)
    assert query(reader.storage, KEYS[:1]) == 1
    link.close()
    raw.close(linger=0)
    context.term()


def test_endpoints():
    assert endpoint_of("10.0.0.1:7") == "tcp://10.0.0.1:7" and endpoint_of("[::1]:8") == "tcp://[::1]:8"
    for wrong in ("", "x", "x:", ":5", "x:99999", "x:y"):
        with pytest.raises(ValueError):
            endpoint_of(wrong)


def test_an_option_that_does_not_exist():
    shape = rank_shape()
    with pytest.raises(ConfigError, match="no option 'folder'"):
        open_storage("peers", {"folder": "/x"}, FakeHost(shape), DIGEST, shape)
    assert isinstance(StorageContext().stall_seconds, float)
