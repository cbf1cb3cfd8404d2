"""Servers that die, stop, are cut off and come back while requests run: every request ends, and no page is lost.

The matrix is {prefill, decode} x {killed, stopped for ten seconds, cut off, restarted at the same port} x {the stages
of staged.py}, with 32 requests in flight, and a server that stands still at the stage when the fault strikes. By
default some of it runs; ``pytest -m slow`` runs the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time

import aiohttp
import msgspec
import psutil
import pytest

from baton.kvtransfer.bootstrap import fetch_ranks
from baton.tests.helpers.harness import Cluster, get_json
from baton.tests.helpers.staged_pair import STAGES, Stages
from baton.tests.kvtransfer.conftest import Bootstrap, Proxy
from baton.tests.tinychat.tasks import held_out, matches

END_SECONDS = 10.0
STOPPED_SECONDS = 10.0
NO_RETRIES = ["--policy", "round_robin", "--retry-max-retries", "0", "--disable-circuit-breaker"]
SMALL_STEPS = ["--chunked-prefill-size", "64", "--num-layer-groups", "3"]

FAULTS = ("killed", "stopped", "cut", "restarted")
ALWAYS = {("prefill", "killed", "mid-chunk"), ("prefill", "stopped", "before the first chunk"),
          ("decode", "cut", "last chunk"), ("decode", "restarted", "first tokens")}
MATRIX = [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
          for case in itertools.product(("prefill", "decode"), FAULTS, STAGES)]


class Staged:
    """A cluster whose servers stand still where a test wants it, and what it takes to end 32 requests undisturbed."""

    def __init__(self, folder):
        self.cluster = Cluster(folder, router_flags=NO_RETRIES, flags=SMALL_STEPS)
        self.stages = Stages(folder)
        for role in ("prefill", "decode"):
            server = getattr(self, role)
            server.argv[2:3] = ["baton.tests.helpers.staged_pair", role]
            server.environment["BATON_STAGES"] = str(folder)
        self.calm_seconds = 0.0

    @property
    def prefill(self):
        return self.cluster.prefill[0]

    @property
    def decode(self):
        return self.cluster.decode[0]

    async def measure(self):
        if not self.calm_seconds:
            await until_right(self.cluster)
            began = time.monotonic()
            await asyncio.gather(*await ask_all(self.cluster.url, 32))
            self.calm_seconds = time.monotonic() - began

    @property
    def end_seconds(self):
        """What has not failed is answered: on a slow machine that takes its time, with or without a fault."""
        return END_SECONDS + 2 * self.calm_seconds


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """One for all tests: each leaves it whole, or fails."""
    staged = Staged(tmp_path_factory.mktemp("faults"))
    with staged.cluster:
        yield staged


@pytest.fixture(scope="module")
def cluster(staged):
    return staged.cluster


@pytest.fixture(scope="module")
def wired(tmp_path_factory):
    """The same with a wire between the two servers that can be cut: ``(staged, wire)``.

    The router names a bootstrap server of ours, which tells the wire's end for the prefill rank's own.
    """
    staged = Staged(tmp_path_factory.mktemp("wired"))
    bootstrap, argv = Bootstrap(), staged.cluster.router.argv
    place = argv.index("--prefill") + 2
    address = ("127.0.0.1", int(argv[place]))
    argv[place] = str(bootstrap.server.port)
    try:
        with staged.cluster:
            (rank,) = fetch_ranks(address, timeout=5.0)
            wire = Proxy(rank.endpoint)
            bootstrap.server.ranks[0, 0, 0] = msgspec.structs.replace(rank, endpoint=wire.endpoint)
            yield staged, wire
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


async def ask_all(url, count):
    """Tasks, one a question, in a session of their own."""
    async def one(example):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(180)) as session:
            return (await ask(session, url, example))[0]
    return [asyncio.ensure_future(one(example)) for example in questions(count)]


_seeds = itertools.count(31)


def questions(count):
    """Others each time: what a prefix cache holds needs hardly any prefill, and a fault would come too late."""
    return held_out(count, seed=next(_seeds), tasks=("needle", "capitals", "sums"))


async def all_right(url, count=12):
    async with aiohttp.ClientSession() as session:
        ended = await asyncio.gather(*(ask(session, url, example) for example in questions(count)))
    return sum(how == "right" for how, _ in ended) >= 0.9 * count


async def until_right(cluster, seconds=30.0):
    """Until answers are right, and come from a pair: while its prefill server is away, decode answers alone."""
    deadline = time.monotonic() + seconds
    while not (whole(cluster) and await all_right(cluster.url)):
        assert time.monotonic() < deadline, "service did not come back"
        await asyncio.sleep(0.2)


def whole(cluster):
    """Whether the router takes all servers for healthy."""
    return all(worker["healthy"] for worker in get_json(cluster.url + "/list_workers")["workers"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role, fault, stage", MATRIX)
async def test_a_fault_at_a_stage(request, role, fault, stage):
    wired = request.getfixturevalue("wired") if fault == "cut" else None
    staged = wired[0] if wired else request.getfixturevalue("staged")
    victim, survivor = (staged.prefill, staged.decode) if role == "prefill" else (staged.decode, staged.prefill)
    await staged.measure()
    staged.stages.arm(stage)
    tasks = await ask_all(staged.cluster.url, 32)
    await asyncio.to_thread(until, lambda: staged.stages.reached, 60 + staged.end_seconds)
    try:
        over = await asyncio.to_thread(strike, fault, victim, wired and wired[1], staged.stages)
        ended = await asyncio.wait_for(asyncio.gather(*tasks), staged.end_seconds)
    finally:
        staged.stages.go()
    assert "wrong" not in ended, ended
    if fault in ("killed", "restarted") and role == "decode":
        assert any(how != "right" for how in ended), "the fault struck nothing"
    survivor.assert_clean(seconds=staged.end_seconds)
    await asyncio.to_thread(over)
    await until_right(staged.cluster, staged.end_seconds + 30)
    for server in staged.cluster.workers:
        server.assert_clean(seconds=staged.end_seconds)


def strike(fault, victim, wire, stages):
    """Returns what ends the fault, where it has not ended by itself. The server that stands still goes on."""
    if fault == "cut":
        wire.cut()
    elif fault == "stopped":
        family = [victim.process.pid, *children_of(victim.process.pid)]
        with contextlib.ExitStack() as resume:
            for pid in family:
                signal_to(pid, signal.SIGSTOP)
                resume.callback(signal_to, pid, signal.SIGCONT)
            stages.go()
            time.sleep(STOPPED_SECONDS)
    else:
        victim.kill()
    stages.go()
    if fault == "restarted":
        victim.start()
    return {"killed": lambda: victim.start().wait_ready(), "restarted": victim.wait_ready}.get(fault, lambda: None)


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {seconds:.0f} s"
        time.sleep(0.005)


async def test_a_wire_that_is_cut_again_and_again(wired):
    staged, wire = wired
    await staged.measure()
    staged.stages.arm("mid-chunk")
    tasks = await ask_all(staged.cluster.url, 32)
    await asyncio.to_thread(until, lambda: staged.stages.reached, 60 + staged.end_seconds)
    wire.cut()
    staged.stages.go()
    for _ in range(5):
        await asyncio.sleep(0.1)
        wire.cut()
    ended = await asyncio.wait_for(asyncio.gather(*tasks), staged.end_seconds)
    assert "wrong" not in ended and any(how != "right" for how in ended), ended
    for server in staged.cluster.workers:
        server.assert_clean(seconds=staged.end_seconds)
    await until_right(staged.cluster)


def children_of(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def signal_to(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
