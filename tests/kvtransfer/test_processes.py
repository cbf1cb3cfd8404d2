"""Two real processes: pages arrive intact, and a peer that dies, stops or restarts ends what it was part of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from baton.common.api.errors import TransferFailed
from baton.kvtransfer.protocol.states import Phase

PEER = pathlib.Path(__file__).with_name("peer.py")


class PeerProcess:
    """``peer.call("phase", 1)`` calls into the other process."""

    def __init__(self, role: str, port: int, backend: str = "nixl", groups: tuple[int, ...] = (2, 1),
                 num_pages: int = 32, peer_timeout: float = 3.0):
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), role, backend, str(port), json.dumps(groups), str(num_pages),
             str(peer_timeout)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def call(self, name: str, *arguments):
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def _answer(self):
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start_peer():
    with contextlib.ExitStack() as stack:
        def start(*args, **kwargs) -> PeerProcess:
            peer = PeerProcess(*args, **kwargs)
            stack.callback(peer.close)
            return peer

        yield start


def until(condition, timeout: float = 10.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("backend", ["nixl", "ipc"])
def test_many_pages_between_two_processes(make_pair, start_peer, backend):
    pair = make_pair(backend)
    decode = start_peer("receiver", 0, backend)
    rng = np.random.default_rng(3)
    for room in range(8):
        src, dst = rng.permutation(32)[:20].tolist(), rng.permutation(32)[:20].tolist()
        decode.call("reserve", room, pair.bootstrap.server.port, 80, dst)
        pair.expect(room, num_tokens=80)
        pair.until(room, Phase.RESERVED, endpoint=pair.sender)
        pair.push_all(room, src=tuple(src))
        pair.finish(room)
        pair.until(room, Phase.DONE, endpoint=pair.sender)
        until(lambda: decode.call("phase", room) == "DONE")  # noqa: B023
        expected = [hashlib.sha256(pages[src].tobytes()).hexdigest() for pages in pair.source]
        assert decode.call("digest", dst) == expected


def joined(pair, peer: PeerProcess, room: int, *, peer_is: str) -> None:
    """One room RESERVED on both sides, one of them in the other process."""
    if peer_is == "receiver":
        peer.call("reserve", room, pair.bootstrap.server.port, 10, [5, 9, 2])
        pair.expect(room)
        pair.until(room, Phase.RESERVED, endpoint=pair.sender)
    else:
        pair.reserve(room)
        peer.call("expect", room, 10)
        until(lambda: peer.call("phase", room) == "RESERVED")
        assert pair.receiver.phase(room) is Phase.RESERVED


@pytest.mark.parametrize("victim, progress, backend", [
    ("receiver", "reserved", "fake"), ("receiver", "pushed", "nixl"), ("sender", "reserved", "fake"),
    ("sender", "pushed", "nixl"), ("receiver", "pushed", "ipc")])
def test_a_killed_peer_ends_the_room_within_5_seconds(make_pair, start_peer, victim, progress, backend):
    pair = make_pair(backend)
    peer = start_peer(victim, pair.bootstrap.server.port, backend)
    joined(pair, peer, 1, peer_is=victim)
    if progress == "pushed" and victim == "sender":
        peer.call("push", 1, 0, [20, 21, 30])
    survivor = pair.sender if victim == "receiver" else pair.receiver
    peer.signal(signal.SIGKILL)
    if progress == "pushed" and victim == "receiver":
        pair.push_all(1)
    assert until(lambda: survivor.phase(1) <= Phase.ABORTING) < 4
    assert until(lambda: survivor.phase(1) is Phase.FAILED) < 5
    assert isinstance(survivor.error(1), TransferFailed)
    survivor.forget(1)

    successor = start_peer(victim, pair.bootstrap.server.port, backend)
    joined(pair, successor, 1, peer_is=victim)
    if victim == "sender":
        successor.call("push", 1, 0, [20, 21, 30])
        successor.call("finish", 1, 7)
    else:
        pair.push_all(1)
        pair.finish(1, 7)
    until(lambda: survivor.phase(1) is Phase.DONE)


def test_a_stopped_sender_frees_no_page_until_it_answers(make_pair, start_peer):
    """The error is known after the peer timeout; the pages wait, since a stopped process may resume in mid-write."""
    pair = make_pair("nixl", peer_timeout=1.0)
    prefill = start_peer("sender", pair.bootstrap.server.port, peer_timeout=1.0)
    joined(pair, prefill, 1, peer_is="sender")
    prefill.call("push", 1, 0, [20, 21])
    prefill.signal(signal.SIGSTOP)
    assert 0.7 < until(lambda: pair.receiver.phase(1) is Phase.ABORTING) < 2.9
    assert "silent for 1 s" in pair.receiver.error(1).message
    time.sleep(2)
    assert pair.receiver.phase(1) is Phase.ABORTING
    prefill.signal(signal.SIGCONT)
    until(lambda: pair.receiver.phase(1) is Phase.FAILED)
    assert until(lambda: prefill.call("phase", 1) == "FAILED") < 2.9
    joined(pair, prefill, 2, peer_is="sender")
    prefill.call("push", 2, 0, [20, 21, 30])
    prefill.call("finish", 2, 7)
    until(lambda: pair.receiver.phase(2) is Phase.DONE)


def test_a_stopped_receiver_ends_on_both_sides(make_pair, start_peer):
    pair = make_pair("nixl", peer_timeout=1.0)
    decode = start_peer("receiver", 0, peer_timeout=1.0)
    joined(pair, decode, 1, peer_is="receiver")
    decode.signal(signal.SIGSTOP)
    assert until(lambda: pair.sender.phase(1) is Phase.FAILED) < 2
    assert "silent for 1 s" in pair.sender.error(1).message
    decode.signal(signal.SIGCONT)
    until(lambda: decode.call("phase", 1) == "FAILED")
    joined(pair, decode, 2, peer_is="receiver")
    pair.push_all(2)
    pair.finish(2)
    until(lambda: decode.call("phase", 2) == "DONE")
