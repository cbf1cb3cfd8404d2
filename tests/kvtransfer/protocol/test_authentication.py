"""Servers without the cluster secret are refused with a sentence; a signed message counts once, and only in its
place."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import zmq

from baton.common.api.errors import ConfigError, TransferFailed
from baton.common.config.server import DisaggregationArgs
from baton.kvtransfer import bootstrap
from baton.kvtransfer.bootstrap import BootstrapServer, SecretMismatch, fetch_ranks, register_rank
from baton.kvtransfer.protocol import messages as m
from baton.kvtransfer.protocol.authentication import TO_RECEIVER, TO_SENDER, AuthError, Channel, Channels, Secret
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.receiver.receiver_state import LookupState
from baton.tests.kvtransfer.conftest import BACKENDS, wait_until
from baton.tests.kvtransfer.test_bootstrap import info


def ends(secret_here="words", secret_there="words", session=b"s"):
    return (Channel(Secret(secret_here), session, TO_SENDER), Channel(Secret(secret_there), session, TO_RECEIVER))


def test_signed_messages_are_read_in_both_directions():
    receiver, sender = ends()
    for message in (b"one", b"", b"three"):
        assert sender.verify(receiver.sign(message)) == message
        assert receiver.verify(sender.sign(message)) == message


@pytest.mark.parametrize("forge", [
    lambda message, code: [message], lambda message, code: [message + b"!", code],
    lambda message, code: [message, code[:-1]], lambda message, code: [message, code[:-1] + bytes([code[-1] ^ 1])],
    lambda message, code: [message, b"\xff" + code[1:]], lambda message, code: [message, code, b""],
    lambda message, code: []])
def test_a_changed_message_or_code_is_refused_and_the_right_one_still_counts(forge):
    receiver, sender = ends()
    frames = receiver.sign(b"message")
    with pytest.raises(AuthError):
        sender.verify(forge(*frames))
    assert sender.verify(frames) == b"message"


def test_a_code_counts_once_and_in_its_own_session_and_direction():
    receiver, sender = ends()
    first, second = receiver.sign(b"1"), receiver.sign(b"2")
    assert sender.verify(second) == b"2"
    for frames in (first, second):
        with pytest.raises(AuthError):
            sender.verify(frames)
    with pytest.raises(AuthError):
        receiver.verify(receiver.sign(b"reflected"))
    with pytest.raises(AuthError):
        ends(session=b"t")[1].verify(receiver.sign(b"3"))
    with pytest.raises(AuthError):
        ends(secret_there="other words")[1].verify(receiver.sign(b"4"))


def test_only_holders_of_the_secret_are_remembered():
    channels = Channels(Secret("words"))
    with pytest.raises(AuthError):
        channels.verify(b"stranger", [b"message", b"x" * 40])
    assert channels._channels == {}
    channels.verify(b"s", ends()[0].sign(b"message"))
    assert list(channels._channels) == [b"s"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_travel_between_servers_of_one_secret(make_pair, backend):
    pair = make_pair(backend, cluster_secret="words")
    for room in range(3):
        pair.transfer(room)


@pytest.mark.parametrize("prefill, decode", [("words", "other"), ("words", None), (None, "words")])
def test_another_secret_is_refused_at_the_bootstrap_server(make_pair, prefill, decode):
    pair = make_pair("fake", cluster_secret=prefill)
    stranger = pair.make_receiver(pair.target, cluster_secret=decode)
    pair.reserve(1, receiver=stranger)
    assert pair.until(1, Phase.FAILED, endpoint=stranger) < 1
    assert "different --cluster-secrets" in stranger.error(1).message
    pair.transfer(2)


@pytest.mark.parametrize("prefill, decode", [("words", "other"), ("words", None), (None, "words")])
def test_another_secret_is_refused_on_the_control_channel(make_pair, prefill, decode):
    """A server that learned the address otherwise is refused by the rank itself."""
    pair = make_pair("fake", cluster_secret=prefill)
    stranger = pair.make_receiver(pair.target, cluster_secret=decode)
    address = pair.bootstrap.address
    with stranger._driver.lock:
        stranger._core.connections.lookups[address] = LookupState()  # its look-up never answers
        stranger._core.reserve(1, address, 77, 10, 3, m.np.empty(0, m.np.int64), time.monotonic())
        stranger._core.connect_to_ranks(address, [pair.sender.info], time.monotonic())
    stranger._driver.io.wake()
    assert pair.until(1, Phase.FAILED, endpoint=stranger) < 1
    assert isinstance(stranger.error(1), TransferFailed) and "different --cluster-secrets" in stranger.error(1).message
    assert not pair.sender._core.sessions.open


def test_a_recorded_session_cannot_be_played_again(make_pair):
    """A session's frames, word for word, over a connection that claims its id: nothing of them counts."""
    pair = make_pair("fake", cluster_secret="words")
    channel, session = Channel(Secret("words"), b"recorded", TO_SENDER), b"recorded"
    hello = m.Hello(msgspec.structs.replace(pair.receiver.info, instance="decode"), pair.sender.info.instance, 32,
                    pair.receiver._backend.local_metadata())
    recording = [channel.sign(m.encode(message)) for message in (hello, m.Bye())]
    for expected in (m.Welcome, m.Refused):
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.ROUTING_ID, session)
            sock.setsockopt(zmq.RCVTIMEO, 2000)
            sock.connect(pair.sender.info.endpoint)
            sock.send_multipart(recording[0])
            assert isinstance(m.decode_to_receiver(sock.recv_multipart()[0]), expected)
            sock.send_multipart(recording[1])
            wait_until(lambda: not pair.sender._core.sessions.open)


def test_the_bootstrap_server_refuses_other_secrets_and_repetitions(monkeypatch):
    async def scenario():
        async with BootstrapServer("127.0.0.1", 0, "words") as server:
            address, url = ("127.0.0.1", server.port), f"http://127.0.0.1:{server.port}"
            for secret in (None, "other"):
                with pytest.raises(ConfigError, match="different --cluster-secrets"):
                    await asyncio.to_thread(register_rank, url, info(), 5.0, secret)
            assert server.ranks == {}
            sent, exchange = [], bootstrap._send_request
            monkeypatch.setattr(bootstrap, "_send_request", lambda *args: sent.append(args) or exchange(*args))
            await asyncio.to_thread(register_rank, url, info(), 5.0, "words")
            assert await asyncio.to_thread(fetch_ranks, address, 1.0, Secret("words")) == [info()]
            with pytest.raises(SecretMismatch):
                await asyncio.to_thread(fetch_ranks, address, 1.0, Secret("other"))
            server.ranks.clear()
            for args in [args for args in sent if args[2] != "/session"]:
                status, body, _ = await asyncio.to_thread(exchange, *args)
                assert status == 401 and b"--cluster-secret" in body
            assert server.ranks == {}
    asyncio.run(scenario())


def test_an_answer_without_the_secret_is_not_believed():
    async def scenario():
        async with BootstrapServer("127.0.0.1", 0) as server:
            server.ranks[0, 0, 0] = info("impostor")
            with pytest.raises(SecretMismatch):
                await asyncio.to_thread(fetch_ranks, ("127.0.0.1", server.port), 1.0, Secret("words"))
    asyncio.run(scenario())


def test_an_empty_secret_is_refused():
    with pytest.raises(ConfigError, match="must not be empty"):
        DisaggregationArgs(cluster_secret="")
