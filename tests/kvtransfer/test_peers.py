"""Sessions ahead of requests: connected, refused for good, warmed up, and ended when weights change."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from baton.common.api.errors import PairMismatch, TransferFailed
from baton.common.api.identity import ModelIdentity
from baton.kvtransfer.bootstrap import register_rank
from baton.kvtransfer.protocol.states import Phase
from baton.tests.kvtransfer.conftest import Pair, wait_until

OLD, NEW = ModelIdentity("0ld", "base"), ModelIdentity("n3w", "base@tuned", 1)
AHEAD = {"spare_page": 31}


def connect(pair, receiver=None):
    """The error that came of it, if one did."""
    receiver = receiver or pair.receiver
    receiver.connect(pair.bootstrap.address)
    found = []
    address = pair.bootstrap.address
    wait_until(lambda: (attempt := receiver.connected(address)) is not None and not found.append(attempt))
    return found[0].error


@pytest.fixture
def pair(request):
    made = Pair(getattr(request, "param", "fake"), peer_timeout=0.6)
    yield made
    made.close()


def test_a_connection_is_there_before_its_first_room(pair):
    assert connect(pair) is None
    assert connect(pair) is None  # and stays
    pair.transfer(1)


@pytest.mark.parametrize("pair", ["fake", "ipc", "nixl"], indirect=True)
def test_the_data_path_is_used_once(pair):
    if pair.backend == "nixl":
        pytest.importorskip("nixl")
    sender = pair.make_sender(pair.source, **AHEAD)
    receiver = pair.make_receiver(pair.target, **AHEAD)
    before = [pool.copy() for pool in pair.target]
    assert connect(pair, receiver) is None
    for source, target, was in zip(pair.source, pair.target, before):
        assert np.array_equal(target[31], source[31]) and not np.array_equal(was[31], source[31])
        assert np.array_equal(target[:31], was[:31])
    assert sender.counters["kv_bytes_sent"] == 0


def test_a_data_path_that_fails_is_reported_and_retried(pair):
    sender = pair.make_sender(pair.source, **AHEAD)
    sender._backend.fail_writes = 1
    receiver = pair.make_receiver(pair.target, **AHEAD)
    error = connect(pair, receiver)
    assert isinstance(error, TransferFailed) and not isinstance(error, PairMismatch)
    assert connect(pair, receiver) is None


def test_an_absent_server_is_no_mismatch(pair):
    pair.receiver.connect(("127.0.0.1", 9))
    wait_until(lambda: (attempt := pair.receiver.connected(("127.0.0.1", 9))) is not None
               and not isinstance(attempt.error, PairMismatch) and attempt.error is not None)


def test_other_weights_are_refused_with_both_names_and_logged_once_on_both_sides(pair, caplog):
    caplog.set_level(logging.WARNING, "baton.kvtransfer")
    pair.make_sender(pair.source, model=OLD, server="http://p:1")
    receiver = pair.make_receiver(pair.target, model=NEW, server="http://d:2")
    for _ in range(3):
        error = connect(pair, receiver)
        assert isinstance(error, PairMismatch)
        assert str(OLD) in error.message and str(NEW) in error.message
    receiver.reserve(1, pair.bootstrap.address, 77, 10, 0, np.array([5, 9, 2]))
    wait_until(lambda: receiver.phase(1) is Phase.FAILED)
    assert receiver.error(1).code == "pair_mismatch"
    wait_until(lambda: len(caplog.records) == 2)
    by_decode, by_prefill = sorted((record.getMessage() for record in caplog.records), reverse=True)
    assert by_decode.startswith("Prefill server 127.0.0.1:") and "http://d:2" in by_prefill
    assert error.message in by_decode and error.message in by_prefill


def test_a_peer_without_a_model_is_accepted_by_its_layout(pair):
    receiver = pair.make_receiver(pair.target, model=NEW)
    assert connect(pair, receiver) is None


def test_keys_are_equal_for_what_fits_alike(pair):
    keys = {pair.make_receiver(pair.target, **kind).key for kind in ({}, {}, {"model": OLD}, {"model": OLD})}
    assert len(keys) == 2
    secret = {pair.make_receiver(pair.target, cluster_secret=words).key for words in ("a", "b", "b")}
    assert len(secret | keys) == 4


@pytest.mark.parametrize(("prefill", "decode"), [("a", "b"), (None, "b"), ("a", None)])
def test_other_secrets_are_refused_and_logged_once_on_both_sides(prefill, decode, caplog):
    caplog.set_level(logging.WARNING, "baton.kvtransfer")
    pair = Pair("fake", cluster_secret=prefill)
    try:
        receiver = pair.make_receiver(pair.target, cluster_secret=decode)
        for _ in range(3):
            assert isinstance(connect(pair, receiver), PairMismatch)
        logged = sorted(record.getMessage().split()[0] for record in caplog.records)
        assert logged == ["A", "Prefill"], caplog.text
    finally:
        pair.close()


def test_sessions_end_with_the_weights_of_prefill(pair):
    sender = pair.make_sender(pair.source, model=OLD)
    receiver = pair.make_receiver(pair.target, model=OLD)
    assert connect(pair, receiver) is None
    receiver.reserve(1, pair.bootstrap.address, 77, 10, 0, np.array([5, 9, 2]))
    wait_until(lambda: receiver.phase(1) is Phase.RESERVED)
    sender.leave()  # with decode's side of a request there, and prefill's still to come
    wait_until(lambda: receiver.phase(1) is Phase.FAILED)
    assert "weights" in receiver.error(1).message
    receiver.connect(pair.bootstrap.address)  # no receiver is admitted meanwhile, and that is no mismatch
    with pytest.raises(AssertionError):
        wait_until(lambda: receiver.connected(pair.bootstrap.address) is not None, 0.3)
    key, instance = sender.key, sender.info.instance
    sender.join(NEW)
    assert sender.key != key and sender.info.instance != instance
    register_rank(pair.bootstrap.url, sender.info)
    attempts = []
    wait_until(lambda: (attempt := receiver.connected(pair.bootstrap.address)) and not attempts.append(attempt))
    assert isinstance(attempts[0].error, PairMismatch)
    receiver.leave()
    receiver.join(NEW)
    assert connect(pair, receiver) is None


def test_sessions_end_with_the_weights_of_decode(pair):
    sender = pair.make_sender(pair.source, model=OLD)
    receiver = pair.make_receiver(pair.target, model=OLD)
    assert connect(pair, receiver) is None
    receiver.leave()
    wait_until(lambda: not sender._core.sessions.open)
    receiver.join(NEW)
    assert isinstance(connect(pair, receiver), PairMismatch)
    sender.leave()
    sender.join(NEW)
    register_rank(pair.bootstrap.url, sender.info)
    assert connect(pair, receiver) is None
