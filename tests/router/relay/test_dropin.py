"""sglang-router's workers API, its flags, and requests that come before the workers are ready."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.common.api.errors import ConfigError
from baton.router.config.workers import HealthArgs

# ---------------------------------------------------------------------- requests before the first checks


@pytest.fixture
def slow_check(worker):
    """``mock, gate = await slow_check()``: a worker that answers its first health check when the gate opens."""

    async def start(**info):
        mock, gate = await worker(**info), asyncio.Event()
        handle = mock.handle

        async def late(served):
            if served.target == b"/health":
                await gate.wait()
            await handle(served)

        mock.handle = late
        return mock, gate

    return start


def sent(client, body: bytes = b'{"text": "x"}') -> asyncio.Task:
    client.send("POST", "/generate", body)
    return asyncio.ensure_future(client.reply())


@pytest.mark.parametrize("pairs", [False, True])
async def test_a_request_that_comes_early_waits_for_the_first_check(start_router, slow_check, connect, script, pairs):
    found = [await slow_check(**({"disaggregation_mode": mode} if pairs else {}))
             for mode in (("prefill", "decode") if pairs else ("null",))]
    mocks = [mock for mock, _ in found]
    router = await start_router(**({"prefill": mocks[:1], "decode": mocks[1:]} if pairs else {"wait": False}),
                                **({"wait": False} if pairs else {"worker_urls": (mocks[0].url,)}))
    reply = sent(await connect(router))
    await script.until(lambda: len(router.entry._first_checks) == 1)
    for _, gate in found:
        assert not reply.done()
        gate.set()
        await asyncio.sleep(0.02)
    assert (await reply).status == 200
    assert not len(router.entry._first_checks)


async def test_waiting_requests_fail_at_once_when_no_worker_is_there(start_router, slow_check, connect, script):
    mock, gate = await slow_check()
    router = await start_router(mock, wait=False)
    reply = sent(await connect(router))
    await script.until(lambda: len(router.entry._first_checks) == 1)
    mock.health = 503  # it is still loading its model
    gate.set()
    assert (await reply).status == 503
    begun = time.monotonic()
    assert (await sent(await connect(router))).status == 503
    assert time.monotonic() - begun < 1


async def test_a_worker_that_is_removed_ends_the_wait(start_router, slow_check, connect, request_to, script):
    mock, _ = await slow_check()
    router = await start_router(mock, wait=False)
    reply = sent(await connect(router))
    await script.until(lambda: len(router.entry._first_checks) == 1)
    assert (await request_to(router, "POST", f"/remove_worker?url={mock.url}")).status == 200
    assert (await reply).status == 503


async def test_a_client_that_leaves_waits_no_more(start_router, slow_check, connect, script):
    mock, gate = await slow_check()
    router = await start_router(mock, wait=False)
    client = await connect(router)
    client.send("POST", "/generate", b'{"text": "x"}')
    await script.until(lambda: len(router.entry._first_checks) == 1)
    client.leave()
    await script.until(lambda: not len(router.entry._first_checks))
    gate.set()
    await script.until(lambda: router.registry.available("regular"))
    assert not mock.posts


async def test_a_router_that_stops_answers_who_waits(start_router, slow_check, connect, script):
    mock, _ = await slow_check()
    router = await start_router(mock, wait=False, shutdown_grace_secs=0.05)
    reply = sent(await connect(router))
    await script.until(lambda: len(router.entry._first_checks) == 1)
    await router.stop()
    assert (await reply).status == 503
    router.stop = lambda: asyncio.sleep(0)


async def test_a_request_waits_for_a_worker_that_may_have_its_model(start_router, worker, slow_check, connect, script):
    a, (b, gate) = await worker(models=["a"]), await slow_check(models=["b"])
    router = await start_router(a, b, wait=False)
    await script.until(lambda: router.registry.available("regular"))
    reply = sent(await connect(router), b'{"model": "b", "text": "x"}')
    assert (await sent(await connect(router), b'{"model": "a", "text": "x"}')).status == 200
    await script.until(lambda: len(router.entry._first_checks) == 1)
    gate.set()
    assert (await reply).status == 200
    assert (len(a.posts), len(b.posts)) == (1, 1)


async def test_a_worker_that_joins_later_delays_no_request(start_router, worker, slow_check, chat, request_to):
    mock, (late, _) = await worker(), await slow_check()
    router = await start_router(mock)
    joining = asyncio.ensure_future(request_to(router, "POST", "/workers", {"url": late.url}))
    await asyncio.sleep(0.02)
    assert (await chat(router, model="gpt-4")).status == 200
    assert (await joining).status == 202  # it waits for a check for a second at most


# ---------------------------------------------------------------------- /workers


async def test_the_life_of_a_worker(start_router, worker, chat, request_to):
    mock = await worker()
    router = await start_router(wait=False)
    fields = {"url": mock.url, "worker_type": "regular", "priority": 70, "cost": 2.5, "labels": {"zone": "a"},
              "model_id": "mine", "runtime": "sglang"}
    made = await request_to(router, "POST", "/workers", fields)
    location = made.headers["location"]
    assert (made.status, made.json["status"], made.json["url"]) == (202, "accepted", mock.url)
    assert location == made.json["location"] == f"/workers/{made.json['worker_id']}"
    assert (await chat(router)).status == 200  # at once: it was checked before the answer
    shown = (await request_to(router, "GET", location)).json
    assert shown | {"id": made.json["worker_id"], "url": mock.url, "model_id": "mine", "priority": 70, "cost": 2.5,
                    "worker_type": "regular", "is_healthy": True, "connection_mode": "HTTP",
                    "metadata": {"zone": "a"}, "disable_health_check": False} == shown
    again = await request_to(router, "POST", "/workers", {"url": mock.url})
    assert (again.status, again.json["worker_id"]) == (202, made.json["worker_id"])
    changed = await request_to(router, "PUT", location, {"priority": 10, "labels": {"rack": "7"}, "api_key": "secret"})
    assert (changed.status, changed.json["worker_id"]) == (202, made.json["worker_id"])
    shown = (await request_to(router, "GET", location)).json
    assert (shown["priority"], shown["cost"], shown["metadata"]) == (10, 2.5, {"zone": "a", "rack": "7"})
    await chat(router)
    assert (b"authorization", b"Bearer secret") in mock.posts[-1].headers
    gone = await request_to(router, "DELETE", location)
    assert (gone.status, gone.json["status"], gone.json["worker_id"]) == (202, "accepted", made.json["worker_id"])
    for method in ("GET", "PUT", "DELETE"):
        assert (await request_to(router, method, location, {})).status == 404


@pytest.mark.parametrize("fields", [
    {}, {"url": 7}, {"url": "nonsense"}, {"url": "http://a:1", "priority": "high"}, {"url": "http://a:1", "cost": []},
    {"url": "http://a:1", "labels": {"a": 1}}, {"url": "http://a:1", "model_id": 7}, {"url": "http://a:1", "labels": 7},
    {"url": "http://a:1", "disable_health_check": "maybe"}, {"url": "http://a:1", "worker_type": "prefill"}])
async def test_bad_workers_are_refused(start_router, request_to, fields):
    router = await start_router(wait=False)
    assert (await request_to(router, "POST", "/workers", fields)).status == 400
    assert not len(router.registry)


async def test_what_cannot_be_changed_is_refused(start_router, worker, request_to):
    router = await start_router(await worker())
    (known,) = router.registry
    reply = await request_to(router, "PUT", f"/workers/{known.id}", {"health_check_interval_secs": 5})
    assert (reply.status, reply.error["param"]) == (400, "health_check_interval_secs")


async def test_admin_keys_guard_every_change(start_router, worker, request_to):
    router = await start_router(await worker(), api_key="client", admin_api_key="admin")
    (known,) = router.registry
    for method, path in (("PUT", f"/workers/{known.id}"), ("DELETE", f"/workers/{known.id}"), ("POST", "/workers")):
        assert (await request_to(router, method, path, {}, "Authorization: Bearer client\r\n")).status == 401


# ---------------------------------------------------------------------- flags


async def test_without_health_checks_workers_are_healthy(start_router, worker, chat, script, unused_tcp_port):
    checks = []
    mock = await worker()
    handle = mock.handle

    async def counted(served):
        if served.target == b"/health":
            checks.append(served)
        await handle(served)

    mock.handle, mock.health = counted, 500
    router = await start_router(mock, disable_health_check=True, health_check_interval_secs=0.01, retry_max_retries=0)
    assert (await chat(router)).status == 200
    mock.behaviour = script.die
    for _ in range(4):
        assert (await chat(router)).status == 503
    mock.behaviour = script.answer
    assert (await chat(router)).status == 200
    assert len(checks) <= 1
    absent = await start_router(worker_urls=(f"http://127.0.0.1:{unused_tcp_port}",), disable_health_check=True)
    assert (await chat(absent)).status == 503
    assert [known.state for known in absent.registry] == ["healthy"]


async def test_a_worker_that_starts_is_asked_at_its_own_interval(start_router, worker, script):
    checks = []
    mock = await worker()
    handle = mock.handle

    async def counted(served):
        if served.target == b"/health":
            checks.append(asyncio.get_running_loop().time())
        await handle(served)

    mock.handle, mock.health = counted, 503
    await start_router(mock, wait=False, worker_startup_check_interval=0.05)
    await script.until(lambda: len(checks) == 4)
    assert 0.14 < checks[3] - checks[0] < 0.45  # at the usual half a second it were 1.5
    with pytest.raises(ConfigError, match="--worker-startup-check-interval must be more than 0"):
        HealthArgs(worker_startup_check_interval=0)


async def test_a_request_that_waited_for_too_long_gets_408(start_router, worker, connect, chat, script):
    router = await start_router(await worker(script.silence), max_concurrent_requests=1, queue_size=1,
                                queue_timeout_secs=0.1)
    first = await connect(router)
    first.send("POST", "/generate", b'{"text": "x"}')
    await script.until(lambda: router.registry.available("regular")[0].load)
    late = await chat(router)
    assert (late.status, late.error["code"], late.headers["retry-after"]) == (408, "queue_timeout", "1")
    first.leave()
