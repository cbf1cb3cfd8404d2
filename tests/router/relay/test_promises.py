"""Promises of this router that other routers are known to break: each promise once, end to end.

More of them, by subject: what passes untouched (test_relay, test_surface), retries and rooms (test_relay, test_pd),
streams that break (test_relay, test_continuation), limits (test_admission).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from urllib.error import URLError

import pytest

from baton.tests.helpers.ports import free_port


@pytest.mark.parametrize("prompt", ['"prompt": [1, 2,3]', '"prompt": ["a",\t"b"]', '"prompt": [[1, 2], [3]]',
                                    '"prompt": ""', '"text": ["a"]', '"input_ids": [5, 6]'])
@pytest.mark.parametrize("pairs", [False, True])
async def test_bodies_pass_untouched_but_for_injected_fields(start_router, worker, request_to, prompt, pairs):
    """Prompts of every form, and fields that only a worker knows."""
    p, d = await worker(), await worker()
    router = await start_router(prefill=[p], decode=[d]) if pairs else await start_router(d)
    rest = '"rid":"ä", "priority": 1e0, "cache_salt":null,"extra": {"a":1,"a":2}, "temperature": 0.10 }\n'
    body = f"{{ {prompt} ,{rest}".encode()
    headers = "X-Custom: One\r\nx-custom: two\r\nAuthorization: Bearer k\r\n"
    assert (await request_to(router, "POST", "/v1/completions", body, headers)).status == 200
    for mock in (p, d) if pairs else (d,):
        (served,) = mock.posts
        assert served.body.endswith(body[1:])
        assert served.json.keys() - json.loads(body).keys() == (
            {"bootstrap_host", "bootstrap_port", "bootstrap_room"} if pairs else set())
        assert [value for name, value in served.headers if name in (b"X-Custom", b"x-custom", b"Authorization")] == [
            b"One", b"two", b"Bearer k"]


@pytest.mark.parametrize("kind", ["pair", "continued"])
async def test_a_slow_reader_slows_the_worker(start_router, worker, connect, script, kind):
    """The buffered bytes of an unread stream stay bounded, for pairs too, and if the router logs the stream."""
    produced = 0
    event = b"data: " + b'{"choices":[{"token_ids":[1]}],"x":"%b"}' % (b"x" * 2**15) + b"\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(event), event)

    async def pour(served):
        nonlocal produced
        served.head()
        for _ in range(64 * 32):
            await served.writable.wait()
            if served.gone.is_set():
                return
            served.write(chunk)
            produced += len(chunk)
            await asyncio.sleep(0)

    d = await worker(pour, stream_continuation=True)
    router = await start_router(d) if kind == "continued" else await start_router(prefill=[await worker()], decode=[d])
    client = await connect(router)
    client.send("POST", "/v1/chat/completions", b'{"messages": [], "stream": true, "temperature": 0}')
    buffered = -1
    while buffered != produced or not buffered:
        buffered = produced
        await asyncio.sleep(0.3)
    assert buffered < 24 * 2**20  # mostly the kernel's socket buffers on both legs
    assert router.dispatcher.registry.available("decode" if kind == "pair" else "regular")[0].load == 1
    client.leave()


async def test_twenty_bad_requests_open_no_breaker(start_router, worker, script, chat):
    """Neither on single workers nor on pairs, whichever of the two refuses."""
    bad, good = await worker(script.status(400)), await worker()
    for router in (await start_router(bad), await start_router(prefill=[bad], decode=[good]),
                   await start_router(prefill=[good], decode=[bad])):
        assert [(await chat(router)).status for _ in range(20)] == [400] * 20
        assert {(w.circuit.state, w.state) for w in router.registry} == {("closed", "healthy")}
        assert not router.metrics.retries


@pytest.mark.parametrize("pairs", [False, True])
async def test_the_cluster_goes_down_and_comes_back(start_router, worker, request_to, chat, pairs):
    """Down: 503 with Retry-After at once, and not ready. Back: ready and serving within two seconds."""
    workers = [await worker() for _ in range(3)]
    options = {"cb_failure_threshold": 2, "retry_max_retries": 1, "health_check_interval_secs": 1.0}
    placed = {"prefill": workers[:1], "decode": workers[1:]} if pairs else {}
    router = await start_router(*(() if pairs else workers), **placed, **options)

    async def within(seconds, status):
        begun = time.monotonic()
        while (await request_to(router, "GET", "/readiness")).status != status:
            await asyncio.sleep(0.02)
            assert time.monotonic() - begun < seconds

    for mock in workers:
        await mock.stop()
    for _ in range(12):
        begun = time.monotonic()
        reply = await chat(router)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert time.monotonic() - begun < 1.0
    await within(2.0, 503)
    for mock in workers:
        await mock.start()
    begun = time.monotonic()
    await within(2.0, 200)
    assert (await chat(router)).status == 200
    assert time.monotonic() - begun < 2.0


async def test_chats_that_share_a_system_prompt_spread(start_router, worker, chat):
    """Affinity considers the whole conversation: its later turns stay on its first worker, other chats go elsewhere."""
    workers = [await worker() for _ in range(4)]
    router = await start_router(*workers, policy="cache_aware")
    system = {"role": "system", "content": "You are kind. " * 60}
    homes = {}
    for turn in range(3):
        for talk in range(16):
            said = [{"role": "user", "content": f"{talk} said {i} " * 150} for i in range(turn + 1)]
            before = [len(mock.posts) for mock in workers]
            assert (await chat(router, messages=[system, *said])).status == 200
            (home,) = [i for i, mock in enumerate(workers) if len(mock.posts) > before[i]]
            assert homes.setdefault(talk, home) == home
    assert sorted(homes.values()) == sorted([0, 1, 2, 3] * 4)


async def test_in_pairs_both_roles_use_what_they_were_sent(start_router, worker, chat):
    prefills, decodes = [await worker() for _ in range(2)], [await worker() for _ in range(3)]
    router = await start_router(prefill=prefills, decode=decodes, policy="cache_aware")
    for turn in range(4):
        for talk in range(6):
            await chat(router, messages=[{"role": "user", "content": f"{talk} said " * (200 + 20 * turn)}])
    hits = {role: router.metrics.decisions[role, "cache_hit"] for role in ("prefill", "decode")}
    assert hits == {"prefill": 18, "decode": 18}


async def test_a_client_that_leaves_frees_both_silent_workers(start_router, worker, script, connect):
    """Also when decode has begun its stream and says nothing any more."""
    async def begin(served):
        served.head()
        served.event("one")
        await script.silence(served)

    p, d = await worker(script.silence), await worker(begin)
    router = await start_router(prefill=[p], decode=[d])
    client = await connect(router)
    client.send("POST", "/v1/chat/completions", b'{"messages": [], "stream": true}')
    await client.reader.readuntil(b"one")
    client.leave()
    await script.until(lambda: (p.left, d.left) == (1, 1), 2.0)


async def test_a_stream_of_a_pair_may_be_long_but_not_silent(start_router, worker, script, chat):
    slow = await worker(script.stream(*"abcdefgh", pause=0.15))
    router = await start_router(prefill=[await worker()], decode=[slow], request_timeout_secs=0.6)
    reply = await chat(router, stream=True)  # 1.2 s in all
    assert (reply.complete, reply.body.count(b"data:")) == (True, 8)


def test_idle_connections_to_workers_end_before_the_workers_end_them():
    from baton.router.net.upstream_pool import IDLE_SECONDS

    assert IDLE_SECONDS < 5  # uvicorn's keep-alive


def test_start_takes_less_than_a_second():
    """0.25 s on the machine this was written on; the bound leaves room for a loaded one. The best of three counts."""
    taken = []
    for _ in range(3):
        port, begun = free_port(), time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "baton.router.launch", "--port", str(port)],
                                   stderr=subprocess.DEVNULL)
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/liveness", timeout=5) as reply:
                        assert reply.status == 200
                    break
                except URLError:
                    assert process.poll() is None
                    assert time.monotonic() - begun < 30
                    time.sleep(0.01)
            taken.append(time.monotonic() - begun)
        finally:
            process.terminate()
            process.wait()
    assert min(taken) < 3, taken


async def test_a_client_that_leaves_while_its_worker_is_called(start_router, worker, connect, script, monkeypatch):
    """The worker is sent nothing, though up to Python 3.11 the connection may come in spite of the cancellation."""
    mock = await worker()
    router = await start_router(mock, health_check_interval_secs=60.0)
    begun, real = asyncio.Event(), asyncio.wait_for

    async def deaf(awaitable, timeout):
        begun.set()
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            pass
        return await real(task, timeout)

    pool = router.dispatcher.pool(next(iter(router.registry)))
    while pool._idle:  # the health check's
        pool._idle.pop().transport.close()
    with monkeypatch.context() as patch:
        patch.setattr("baton.router.net.upstream_pool.asyncio.wait_for", deaf)
        client = await connect(router)
        client.send("POST", "/generate", b'{"text": "a"}')
        await begun.wait()
        client.leave()
        await asyncio.sleep(0.1)
    assert not mock.posts
    await script.until(lambda: not mock.connections)
