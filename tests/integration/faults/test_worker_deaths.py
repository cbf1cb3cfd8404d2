"""Workers that hang, and engines that die under their API server: requests go on elsewhere, as after a kill."""

from __future__ import annotations

import asyncio
import signal
import time

import aiohttp
import psutil
import pytest

from baton.tests.helpers.harness import Cluster, get_json
from baton.tests.integration.faults.test_chaos import TOTAL, stream
from baton.tests.integration.faults.test_dead_processes import ranks_of
from baton.tests.integration.faults.test_faults import until
from baton.tests.tinychat.tasks import held_out

NOTICED_SECONDS = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("deaths"), prefill=2, decode=2) as made:
        yield made


def signal_all(server, number):
    """The API server and its ranks, as a frozen container stops them all."""
    process = psutil.Process(server.process.pid)
    for each in (process, *process.children(recursive=True)):
        each.send_signal(number)


def healthy(cluster):
    return sum(worker["healthy"] for worker in get_json(cluster.url + "/list_workers")["workers"])


class Load:
    """Streams under way, until they are told to stop; each must end with the right answer."""

    def __init__(self, cluster, streams):
        self.ended: list[str] = []
        self._stop = asyncio.Event()
        self._http = aiohttp.ClientSession(timeout=TOTAL, connector=aiohttp.TCPConnector(limit=0))
        self._tasks = [asyncio.ensure_future(self._run(cluster.url, seed)) for seed in range(streams)]

    async def _run(self, url, seed):
        for example in held_out(200, seed=seed, tasks=("count", "needle")):
            if self._stop.is_set():
                return
            self.ended.append(await stream(self._http, url, example))

    async def after(self, count):
        """Wait until so many more have ended."""
        count += len(self.ended)
        while len(self.ended) < count and not any(task.done() for task in self._tasks):
            await asyncio.sleep(0.02)

    async def finish(self):
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self._http.close()
        return set(self.ended)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
async def test_a_stopped_worker_is_left_within_seconds_and_taken_in_again(cluster, role):
    victim = getattr(cluster, role)[0]
    load = Load(cluster, 6)
    await load.after(12)
    signal_all(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        await asyncio.to_thread(until, lambda: healthy(cluster) == 3, NOTICED_SECONDS)
        running = len([task for task in load._tasks if not task.done()])
        await load.after(3 * running)  # all streams have gone on: nobody waits for the victim any more
        assert time.monotonic() - stopped < 4 * NOTICED_SECONDS
    finally:
        signal_all(victim, signal.SIGCONT)
    await asyncio.to_thread(until, lambda: healthy(cluster) == 4, 20)
    await load.after(12)
    assert await load.finish() == {"right"}
    for server in cluster.workers:
        server.assert_clean()


@pytest.mark.timeout(120)
async def test_decode_alone_goes_on_when_all_prefill_engines_die(cluster):
    load = Load(cluster, 8)
    await load.after(8)
    for rank in [ranks_of(server)[0] for server in cluster.prefill]:
        rank.kill()
    await load.after(24)
    assert await load.finish() == {"right"}
    for server in cluster.prefill:
        assert server.process.wait(40) == 1
        server.start()
    for server in cluster.prefill:
        server.wait_ready()
    await asyncio.to_thread(until, lambda: healthy(cluster) == 4, 20)
    for server in cluster.workers:
        server.assert_clean()
