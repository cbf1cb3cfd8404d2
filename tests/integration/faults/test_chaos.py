"""Workers of a cluster are killed and restarted in turn under streams: no client notices."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from baton.tests.helpers.harness import Cluster
from baton.tests.tinychat.tasks import held_out, matches

TOTAL = aiohttp.ClientTimeout(120)


async def stream(session, url, example):
    """The answer of one stream; raises where it fails in any way."""
    body = {"model": "tinychat", "messages": example.messages, "temperature": 0, "stream": True}
    content, events = "", []
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: "):
                events.append(line[6:].strip())
    assert events and events[-1] == b"[DONE]", events[-1:]
    for event in events[:-1]:
        told = json.loads(event)
        assert "error" not in told, told
        if told["choices"]:
            content += told["choices"][0]["delta"].get("content") or ""
    return "right" if matches(example, {"content": content, "role": "assistant"}) else f"wrong: {content}"


async def load(session, url, ended, stop, seed):
    examples = held_out(12, seed=seed, tasks=("count", "needle", "count"))
    while not stop.is_set():
        for example in examples:
            if stop.is_set():
                return
            try:
                ended.append(await stream(session, url, example))
            except (AssertionError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                ended.append(f"failed: {error!r}")


async def continued_streams(http, cluster):
    """How many streams the router has carried on with another pair."""
    async with http.get(cluster.url + "/metrics") as answer:
        metrics = await answer.text()
    line = next(line for line in metrics.splitlines() if line.startswith("baton_router_continued_streams_total"))
    return float(line.split()[1])


async def kill_once(victim, ended, streams):
    """Kill one worker once every stream had time for another answer, and wait until it serves again."""
    begun = len(ended)
    deadline = time.monotonic() + 20
    while len(ended) < begun + streams and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    victim.kill()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(lambda: victim.start().wait_ready())
    await asyncio.sleep(1.5)


async def kill_in_turn(cluster, victims, streams):
    """Kill each of the victims under ``streams`` of load and start it again; every stream must end right."""
    stop, ended = asyncio.Event(), []
    async with aiohttp.ClientSession(timeout=TOTAL, connector=aiohttp.TCPConnector(limit=0)) as http:
        tasks = [asyncio.ensure_future(load(http, cluster.url, ended, stop, seed)) for seed in range(streams)]
        try:
            for victim in victims:
                await kill_once(victim, ended, streams)
            # A kill may fall where no stream has its first token and not its last; then nothing had to be continued.
            for _ in range(8):
                if await continued_streams(http, cluster):
                    break
                await kill_once(cluster.decode[0], ended, streams)
        finally:
            stop.set()
            await asyncio.gather(*tasks)
        continued = await continued_streams(http, cluster)
    assert len(ended) > streams * len(victims)
    assert set(ended) == {"right"}, [how for how in ended if how != "right"][:5]
    assert continued > 0, "no stream was cut: the test shows nothing"


def two_pairs(tmp_path):
    flags = ["--policy", "round_robin", "--retry-max-retries", "12"]
    return Cluster(tmp_path, prefill=2, decode=2, router_flags=flags)


@pytest.mark.timeout(300)
async def test_a_worker_of_each_role_is_killed_and_restarted_under_streams(tmp_path):
    with two_pairs(tmp_path) as cluster:
        await kill_in_turn(cluster, [cluster.decode[0], cluster.prefill[0]], streams=12)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_each_worker_is_killed_and_restarted_under_streams(tmp_path):
    with two_pairs(tmp_path) as cluster:
        await kill_in_turn(cluster, cluster.workers, streams=32)
