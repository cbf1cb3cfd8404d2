"""Polling instead of sleeping: for how long, and that it ends."""

from __future__ import annotations

import asyncio
import time

from baton.router.net.busy_poll import BusyPoll


class Loop:
    """Runs the callbacks of call_soon on request."""

    def __init__(self):
        self.soon = []

    def call_soon(self, callback):
        self.soon.append(callback)

    def turn(self):
        due, self.soon = self.soon, []
        for callback in due:
            callback()
        return bool(self.soon)


def test_it_polls_until_the_time_after_the_last_arrival_is_over():
    loop, now = Loop(), [0.0]
    poll = BusyPoll(loop, 0.010, lambda: now[0])  # type: ignore[arg-type]
    assert not loop.turn(), "nothing arrived, and the loop is kept from sleeping"
    poll.heard()
    poll.heard()
    assert len(loop.soon) == 1
    turns = []
    for millisecond in range(30):
        now[0] = millisecond / 1000
        if millisecond == 5:
            poll.heard()
        turns.append(loop.turn())
    assert turns == [True] * 15 + [False] * 15
    poll.heard()
    assert loop.turn(), "it sleeps for ever"


async def test_the_router_polls_after_an_arrival_and_sleeps_again(start_router, worker, connect):
    client = await connect(await start_router(await worker(), busy_poll_us=200_000.0, health_check_interval_secs=30.0))
    client.send("POST", "/generate", b"{}")
    assert (await client.reply()).status == 200
    used = time.thread_time()
    await asyncio.sleep(0.15)
    polling = time.thread_time() - used
    await asyncio.sleep(0.3)
    used = time.thread_time()
    await asyncio.sleep(0.15)
    sleeping = time.thread_time() - used
    assert polling > 4 * sleeping, (polling, sleeping)
