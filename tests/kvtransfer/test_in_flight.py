"""While a write may land, no page is free: the fake backend holds writes in the air."""

from __future__ import annotations

import contextlib
import time

import msgspec
import numpy as np
import pytest
import zmq

from baton.common.api.errors import Aborted, TransferFailed
from baton.kvtransfer.protocol import messages
from baton.kvtransfer.protocol.states import Phase
from baton.tests.kvtransfer.conftest import Proxy, wait_until


@pytest.fixture
def pair(make_pair):
    pair = make_pair("fake", peer_timeout=0.6)
    pair.reserve(1)
    pair.expect(1)
    pair.until(1, Phase.RESERVED)
    return pair


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_an_abort_waits_for_writes_in_flight(pair, by):
    gate = pair.receiver._backend.gate
    gate.clear()
    pair.push_all(1)
    pair.finish(1)
    time.sleep(0.05)
    getattr(pair, by).abort(1, Aborted("the client left"))
    pair.until(1, Phase.ABORTING)
    time.sleep(1.0)  # longer than any timeout: the peers are alive, so nothing but the write's end counts
    assert pair.sender.phase(1) is pair.receiver.phase(1) is Phase.ABORTING
    assert isinstance(pair.receiver.error(1), Aborted)
    gate.set()
    pair.until(1, Phase.FAILED)
    assert pair.receiver._backend.num_arrived == 2


def test_a_failed_write_fails_the_room_and_the_next_session_works(pair):
    pair.sender._backend.fail_writes = 1
    pair.push_all(1)
    pair.finish(1)
    pair.until(1, Phase.FAILED)
    for endpoint in (pair.sender, pair.receiver):
        assert isinstance(endpoint.error(1), TransferFailed)
        assert endpoint.counters["kv_transfers_failed_kv_transfer_failed"] == 1
    assert pair.sender.counters["kv_transfers_broken_write_failed"] == 1
    assert pair.receiver.counters["kv_transfers_broken_ended"] == 1
    pair.transfer(2)


def test_nothing_is_posted_without_a_lease(pair):
    """A sender that hears no Pong stops writing; here its session forgets the lease, as after a long stop."""
    (session,) = pair.sender._core.sessions.open.values()
    session.lease = 0.0
    with pair.sender._driver.lock:
        pair.sender._core.push(1, 0, 0, np.array([20, 21, 30]), None)
        assert pair.sender._core.queue.take(time.monotonic(), lambda event: True) == []
    pair.sender.push(1, 1, 0, np.array([20, 21, 30]), None)
    pair.finish(1)
    pair.until(1, Phase.DONE)  # the next Pong renews it


def test_a_cut_connection_fails_both_sides_and_the_next_session_works(make_pair):
    pair = make_pair("fake", peer_timeout=0.6)
    with contextlib.closing(Proxy(pair.sender.info.endpoint)) as proxy:
        pair.bootstrap.server.ranks[0, 0, 0] = msgspec.structs.replace(pair.sender.info, endpoint=proxy.endpoint)
        pair.reserve(1)
        pair.expect(1)
        pair.until(1, Phase.RESERVED)
        pair.push_all(1)
        proxy.cut()
        assert wait_until(lambda: pair.receiver.phase(1) is Phase.ABORTING) < 0.3
        assert 0.3 < pair.until(1, Phase.FAILED) < 2  # not before the sender must have given up
        for endpoint in (pair.sender, pair.receiver):
            assert isinstance(endpoint.error(1), TransferFailed)
        assert pair.receiver.counters["kv_transfers_broken_connection_lost"] == 1
        assert pair.sender.counters["kv_transfers_broken_silent"] == 1
        pair.transfer(2)


def test_exposed_seconds_are_counted_separately(pair):
    gate = pair.receiver._backend.gate
    pair.push_all(1)
    wait_until(lambda: pair.receiver._backend.num_arrived == 2)  # while prefill computes
    time.sleep(0.2)
    pair.finish(1)
    pair.until(1, Phase.DONE)
    counters = pair.sender.counters
    hidden = counters["kv_transfer_exposed_seconds"]
    assert hidden + 0.2 <= counters["kv_transfer_seconds"]
    pair.reserve(2)
    pair.expect(2)
    pair.until(2, Phase.RESERVED)
    gate.clear()
    pair.push_all(2)
    pair.finish(2)
    wait_until(lambda: pair.sender.writes_waiting == (0, 2))
    time.sleep(0.2)
    gate.set()
    pair.until(2, Phase.DONE)
    assert pair.sender.counters["kv_transfer_exposed_seconds"] >= hidden + 0.2
    wait_until(lambda: pair.sender.writes_waiting == (0, 0))


def test_garbage_on_the_control_channel_is_dropped_and_counted(pair):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(pair.sender.info.endpoint)
        declined = messages.encode(messages.Decline(1, "code", "words"))
        for frame in (b"", b"\xc1", b"\x81\xa4type\xa5hello", b"x" * 1000, declined.replace(b"words", b"\xff" * 5)):
            stranger.send(frame)
        deadline = time.monotonic() + 2
        while pair.sender.counters["kv_messages_dropped"] < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert pair.sender.counters["kv_messages_dropped"] == 5
    pair.push_all(1)
    pair.finish(1)
    pair.until(1, Phase.DONE)
