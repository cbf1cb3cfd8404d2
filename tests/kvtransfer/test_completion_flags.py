"""Pages whose arrival is seen in memory, before the message that reports it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from baton.common.api.errors import Aborted
from baton.common.shared_memory.host import shared_bytes
from baton.kvtransfer.backends import ipc, ipc_host
from baton.kvtransfer.backends.base import Region, WriteState
from baton.kvtransfer.backends.ipc import IpcBackend
from baton.kvtransfer.protocol import messages as m
from baton.kvtransfer.protocol.states import Phase
from baton.tests.kvtransfer.conftest import wait_until

PAGES, PAGE_BYTES = 8, 64


@pytest.fixture
def ends(monkeypatch):
    """A sender's and a receiver's backend; a poll copies one page."""
    monkeypatch.setattr(ipc_host, "_BYTES_PER_POLL", PAGE_BYTES)
    made = []
    for _ in range(2):
        pool = shared_bytes(PAGES * PAGE_BYTES)
        made.append(IpcBackend())
        made[-1].register([Region(pool.ctypes.data, pool.nbytes, -1)], [PAGES])
        made[-1].pool = pool
    yield made
    for backend in made:
        backend.close()


def test_a_completion_flag_is_written_when_all_copies_to_the_peer_are_done(ends):
    sender, receiver = ends
    peer = sender.add_peer(receiver.local_metadata(), [1], [1])
    other = sender.add_peer(receiver.local_metadata(), [1], [1])
    ids = np.array([1, 4])
    first, second = (sender.write(peer, 0, ids, 0, ids) for _ in range(2))
    elsewhere = sender.write(other, 0, ids, 0, ids)
    place = sender.write_flag(peer, 77)
    assert [sender.poll(second), sender.poll(second)] == [WriteState.PENDING, WriteState.DONE]
    assert sender.poll(first) is WriteState.PENDING and not receiver.completion_flags().any()
    assert sender.poll(first) is WriteState.DONE
    assert receiver.completion_flags()[place] == 77 and np.count_nonzero(receiver.completion_flags()) == 1
    assert sender.poll(elsewhere) is WriteState.PENDING
    assert receiver.completion_flags()[sender.write_flag(peer, 78)] == 78


def test_no_flag_of_a_removed_peer_is_written(ends):
    sender, receiver = ends
    peer = sender.add_peer(receiver.local_metadata(), [1], [1])
    write = sender.write(peer, 0, np.array([1, 4]), 0, np.array([1, 4]))
    sender.write_flag(peer, 77)
    sender.remove_peer(peer)
    assert sender.poll(write) is WriteState.FAILED and sender.write_flag(peer, 78) is None
    assert not receiver.completion_flags().any()


def test_a_peer_without_completion_flags_is_written_to(ends, monkeypatch):
    sender, receiver = ends
    monkeypatch.setattr(receiver, "_flags", None)
    peer = sender.add_peer(receiver.local_metadata(), [1], [1])
    assert sender.write_flag(peer, 77) is None
    write = sender.write(peer, 0, np.array([3]), 0, np.array([2]))
    assert sender.poll(write) is WriteState.DONE


@pytest.fixture
def pair(make_pair, monkeypatch):
    """Whose sender's messages of the kinds in ``lost`` do not arrive."""
    monkeypatch.setattr(ipc, "_NUM_FLAGS", 8)
    pair = make_pair("ipc", kv_checksum="off")
    pair.lost, send = (), pair.sender._send
    monkeypatch.setattr(pair.sender, "_send", lambda effect: isinstance(effect.message, pair.lost) or send(effect))
    return pair


def held_back(pair, monkeypatch):
    """Copies do not end before the function returned is called."""
    poll, open_ = ipc_host._HostCopy.poll, []
    monkeypatch.setattr(ipc_host._HostCopy, "poll", lambda copy: poll(copy) if open_ else WriteState.PENDING)
    return lambda: open_.append(True)


def begun(pair, room):
    pair.reserve(room)
    pair.expect(room)
    pair.until(room, Phase.RESERVED, endpoint=pair.sender)
    pair.push_all(room)
    pair.finish(room)


def test_pages_have_arrived_when_their_flag_is_set(pair, monkeypatch):
    pair.lost, release = m.Result, held_back(pair, monkeypatch)
    begun(pair, 1)
    wait_until(lambda: bool(pair.receiver._core.transfers[1].early_results))
    time.sleep(0.02)
    assert pair.receiver.phase(1) is Phase.RESERVED
    release()
    pair.until(1, Phase.DONE)
    assert pair.receiver.result(1).token_id == 42
    for source, target in zip(pair.source, pair.target):
        assert np.array_equal(target[[5, 9, 2]], source[[20, 21, 30]])


def test_the_result_that_follows_is_no_surprise(pair):
    """More rooms than there are flags, whose numbers are used again."""
    for room in (1, 2, 1, *range(3, 23)):
        begun(pair, room)
        pair.until(room, Phase.DONE)
        for transfer in (pair.sender, pair.receiver):
            transfer.forget(room)
    (session,) = pair.receiver._core.connections.sessions.values()
    wait_until(lambda: not session.completed_early)
    assert pair.receiver.counters["kv_messages_dropped"] == 0
    assert pair.receiver.counters["kv_transfers_done"] == 23


def test_without_a_flag_the_result_completes(pair):
    pair.lost = m.EarlyResult
    begun(pair, 1)
    pair.until(1, Phase.DONE)


def test_an_abort_comes_before_a_flag(pair, monkeypatch):
    """Pages are freed when the writer has drained, whatever was announced."""
    release = held_back(pair, monkeypatch)
    begun(pair, 1)
    wait_until(lambda: bool(pair.receiver._core.transfers[1].early_results))
    pair.receiver.abort(1, Aborted("the client has left"))
    assert pair.receiver.phase(1) is Phase.ABORTING
    pair.until(1, Phase.ABORTING, endpoint=pair.sender)
    release()
    pair.until(1, Phase.FAILED)
