"""Servers that die, stop, are cut off and come back while requests run: every request ends, and no page is lost.

By default each fault strikes once, in the middle of a burst of 32 requests; ``pytest -m slow`` lets it strike at other
moments: before the first connection, between the first pages, and among the last tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time

import aiohttp
import msgspec
import psutil
import pytest

from baton.common.tinychat.tasks import held_out, matches
from baton.kvtransfer.bootstrap import fetch_ranks
from baton.tests.integration.harness import Cluster
from baton.tests.kvtransfer.conftest import Bootstrap, Proxy

END_SECONDS = 10.0
STOPPED_SECONDS = 10.0
NO_RETRIES = ["--policy", "round_robin", "--retry-max-retries", "0"]

MOMENTS = [0.15, *(pytest.param(after, marks=pytest.mark.slow) for after in (0.0, 0.03, 0.08, 0.4, 0.8))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One for all tests: each leaves it whole, or fails."""
    with Cluster(tmp_path_factory.mktemp("faults"), router_flags=NO_RETRIES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def wired(tmp_path_factory):
    """A cluster whose decode server reaches its prefill server over a wire that can be cut: ``(cluster, wire)``.

    The router names a bootstrap server of ours, which tells the wire's end for the prefill rank's own.
    """
    cluster = Cluster(tmp_path_factory.mktemp("wired"), router_flags=NO_RETRIES)
    bootstrap, argv = Bootstrap(), cluster.router.argv
    place = argv.index("--prefill") + 2
    address = ("127.0.0.1", int(argv[place]))
    argv[place] = str(bootstrap.server.port)
    try:
        with cluster:
            (rank,) = fetch_ranks(address, timeout=5.0)
            wire = Proxy(rank.endpoint)
            bootstrap.server.ranks[0, 0] = msgspec.structs.replace(rank, endpoint=wire.endpoint)
            yield cluster, wire
            wire.close()
    finally:
        bootstrap.close()


async def ask(session, url, example):
    """``(ended with, seconds)``: "right", "wrong", or the HTTP status of an error."""
    start = time.monotonic()
    body = {"model": "tinychat", "messages": example.messages, "temperature": 0}
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        parsed = await answer.json()
        seconds = time.monotonic() - start
        if answer.status != 200:
            assert parsed["error"]["message"]
            return answer.status, seconds
        return ("right" if matches(example, parsed["choices"][0]["message"]) else "wrong"), seconds


_seeds = itertools.count(31)


def questions(count):
    """Others each time: what a prefix cache holds needs hardly any prefill, and a fault would come too late."""
    return held_out(count, seed=next(_seeds), tasks=("needle", "capitals", "sums"))


async def all_right(url, count=12):
    async with aiohttp.ClientSession() as session:
        ended = await asyncio.gather(*(ask(session, url, example) for example in questions(count)))
    return sum(how == "right" for how, _ in ended) >= 0.9 * count


async def disturb(cluster, act, after=0.15, count=32):
    """Ask ``count`` questions at once, ``act`` while they run; returns how each ended."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        tasks = [asyncio.ensure_future(ask(session, cluster.url, example)) for example in questions(count)]
        await asyncio.sleep(after)
        act()
        acted = time.monotonic()
        ended = await asyncio.gather(*tasks)
        assert time.monotonic() - acted < END_SECONDS, f"the last request ended after {time.monotonic() - acted:.1f} s"
    return [how for how, _ in ended]


async def until_right(cluster, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not await all_right(cluster.url):
        assert time.monotonic() < deadline, "service did not come back"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("after", MOMENTS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_killed_and_restarted_behind_the_same_address(cluster, role, after):
    await until_right(cluster)
    victim = getattr(cluster, role)[0]
    survivor = getattr(cluster, {"prefill": "decode", "decode": "prefill"}[role])[0]
    ended = await disturb(cluster, victim.kill, after)
    assert "wrong" not in ended, ended
    if role == "decode":  # without prefill, requests may still be answered; without decode none can
        assert any(how != "right" for how in ended), ended
    survivor.assert_clean(seconds=END_SECONDS)
    victim.start().wait_ready()
    await until_right(cluster)
    for server in cluster.workers:
        server.assert_clean()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_stopped_for_ten_seconds(cluster, role):
    """SIGSTOP of a whole server: its peer counts it as dead, later bytes of it change nothing.

    Pages that a stopped writer was told of stay held until it runs again and says that it is quiet: a write of its
    may be half done.
    """
    await until_right(cluster)
    victim = getattr(cluster, role)[0]
    survivor = getattr(cluster, {"prefill": "decode", "decode": "prefill"}[role])[0]
    family = [victim.process.pid, *children_of(victim.process.pid)]

    def freeze():
        for pid in family:
            signal_to(pid, signal.SIGSTOP)

    threading.Timer(STOPPED_SECONDS, lambda: [signal_to(pid, signal.SIGCONT) for pid in family]).start()
    if role == "prefill":  # decode notices and answers at once; with decode stopped the router waits for its bytes
        ended = await disturb(cluster, freeze)
        assert "wrong" not in ended, ended
        survivor.assert_clean(seconds=STOPPED_SECONDS)
    else:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            tasks = [asyncio.ensure_future(ask(session, cluster.url, example)) for example in questions(32)]
            await asyncio.sleep(0.15)
            freeze()
            ended = [how for how, _ in await asyncio.gather(*tasks)]
            assert "wrong" not in ended, ended
    await asyncio.sleep(1.0)
    await until_right(cluster)
    for server in cluster.workers:
        server.assert_clean()


@pytest.mark.parametrize("after", MOMENTS)
async def test_a_cut_connection_between_the_servers(wired, after):
    """Both are alive and reach each other again at once: the requests under way end, the next ones are answered."""
    cluster, wire = wired
    await until_right(cluster)
    ended = await disturb(cluster, wire.cut, after)
    assert "wrong" not in ended, ended
    for server in cluster.workers:
        server.assert_clean(seconds=END_SECONDS)
    assert await all_right(cluster.url)


async def test_a_wire_that_is_cut_again_and_again(wired):
    cluster, wire = wired
    await until_right(cluster)
    cuts = threading.Timer(0.05, lambda: [(wire.cut(), time.sleep(0.1)) for _ in range(5)])
    ended = await disturb(cluster, cuts.start, after=0.0)
    cuts.join()
    assert "wrong" not in ended and any(how != "right" for how in ended), ended
    for server in cluster.workers:
        server.assert_clean(seconds=END_SECONDS)
    assert await all_right(cluster.url)


def children_of(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def signal_to(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
