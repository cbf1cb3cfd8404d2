"""Writes of one iteration of the loop are made at its end, in order, and before a transport is closed."""

from __future__ import annotations

import asyncio

import pytest

from baton.router.net.outbox import Outbox


class Transport:
    def __init__(self, log: list, name: str = "a"):
        self.log, self.name, self.closed = log, name, False

    def write(self, data):
        self.log.append((self.name, data))

    def writelines(self, parts):
        self.write(b"".join(parts))

    def is_closing(self):
        return self.closed

    def close(self):
        self.log.append((self.name, "closed"))
        self.closed = True

    def abort(self):
        self.closed = True


@pytest.fixture
def log():
    return []


async def test_writes_wait_for_the_end_of_the_iteration_and_keep_their_order(log):
    outbox = Outbox(asyncio.get_running_loop())
    one, other = Transport(log, "one"), Transport(log, "other")
    outbox.put(one, b"1")
    outbox.put(other, (b"2", b"3"))
    outbox.put(one, b"4")
    assert not log
    await asyncio.sleep(0)
    assert log == [("one", b"1"), ("other", b"23"), ("one", b"4")]
    outbox.put(other, b"5")
    await asyncio.sleep(0)
    assert log[3:] == [("other", b"5")]


async def test_what_waits_is_out_before_the_transport_closes(log):
    outbox = Outbox(asyncio.get_running_loop())
    transport = Transport(log)
    outbox.put(transport, b"1")
    outbox.close(transport)
    await asyncio.sleep(0)
    assert log == [("a", b"1"), ("a", "closed")]


async def test_a_transport_that_was_aborted_is_passed_over(log):
    outbox = Outbox(asyncio.get_running_loop())
    gone, there = Transport(log, "gone"), Transport(log, "there")
    outbox.put(gone, b"1")
    outbox.put(there, b"2")
    gone.abort()
    await asyncio.sleep(0)
    assert log == [("there", b"2")]


async def test_writes_queued_by_a_write_are_made_in_the_next_iteration(log):
    """A write may fill a transport's buffer, whose protocol then pauses another side, or says something itself."""
    outbox = Outbox(asyncio.get_running_loop())

    class Talking(Transport):
        def write(self, data):
            super().write(data)
            if data == b"1":
                outbox.put(self, b"2")

    transport = Talking(log)
    outbox.put(transport, b"1")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log == [("a", b"1"), ("a", b"2")]
