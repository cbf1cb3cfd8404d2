"""Workers that drain and leave while requests run on them, and the workers as a resource."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest


@pytest.fixture
def gated(worker):
    """``mock, gate = await gated()``: a worker that streams "one", waits for the gate, and streams "two"."""

    async def start():
        gate = asyncio.Event()

        async def behave(served):
            served.head()
            served.event("one")
            await gate.wait()
            served.event("two")
            served.end()

        return await worker(behave), gate

    return start


async def streaming(connect, router, script, mock):
    """A client whose stream has begun on ``mock``."""
    client = await connect(router)
    client.send("POST", "/v1/chat/completions", b'{"messages": [], "stream": true}')
    await script.until(lambda: mock.posts)
    return client


async def test_a_draining_worker_ends_its_streams_takes_nothing_new_and_leaves(
        start_router, worker, script, chat, connect, request_to, gated):
    mock, gate = await gated()
    other = await worker()
    router = await start_router(mock, other, policy="round_robin")
    if router.registry.available("regular")[1].url == other.url:  # round robin begins with the second
        await chat(router)
    client = await streaming(connect, router, script, mock)
    reply = await request_to(router, "POST", f"/drain_worker?url={mock.url}")
    assert (reply.status, reply.json["running"]) == (200, 1)
    listed = {shown["url"]: shown for shown in (await request_to(router, "GET", "/list_workers")).json["workers"]}
    assert (listed[mock.url]["draining"], listed[other.url]["draining"]) == (True, False)
    assert [(await chat(router)).status for _ in range(4)] == [200] * 4
    assert len(mock.posts) == 1
    gate.set()
    assert (await client.reply()).body.endswith(b"data: two\n\n")
    await script.until(lambda: len(router.registry) == 1)
    assert (await request_to(router, "POST", f"/drain_worker?url={mock.url}")).status == 404


async def test_an_idle_worker_leaves_at_once(start_router, worker, request_to):
    mock = await worker()
    router = await start_router(mock)
    assert (await request_to(router, "POST", f"/drain_worker?url={mock.url}")).json["running"] == 0
    assert (await request_to(router, "GET", "/list_workers")).json["workers"] == []


@pytest.mark.parametrize("force", [False, True])
async def test_removing_a_busy_worker_breaks_its_stream_only_by_force(
        start_router, script, connect, request_to, gated, force):
    mock, gate = await gated()
    router = await start_router(mock)
    client = await streaming(connect, router, script, mock)
    await asyncio.sleep(0.02)
    assert (await request_to(router, "POST", f"/remove_worker?url={mock.url}&force={force}")).status == 200
    assert len(router.registry) == 0
    if not force:
        gate.set()
    body = (await client.reply()).body
    assert (b"two" in body, b'"error"' in body) == (not force, force)


async def test_a_prefill_worker_drains_when_its_call_has_ended(
        start_router, worker, script, connect, request_to, gated):
    p, gate = await gated()
    d = await worker()
    router = await start_router(prefill=[p], decode=[d])
    client = await connect(router)
    client.send("POST", "/generate", b'{"text": "a"}')
    assert (await client.reply()).status == 200
    assert (await request_to(router, "POST", f"/drain_worker?url={p.url}")).json["running"] == 1
    gate.set()
    await script.until(lambda: len(router.registry) == 1)


async def test_workers_as_a_resource(start_router, worker, script, chat, request_to):
    router = await start_router(wait=False)
    mock = await worker()
    made = await request_to(router, "POST", "/workers", {"url": mock.url, "worker_type": "regular"})
    assert (made.status, made.json["status"], made.json["location"]) == (202, "accepted", made.headers["location"])
    await script.until(lambda: router.registry.available("regular"))
    assert (await chat(router)).status == 200
    by_id = await request_to(router, "GET", made.headers["location"])
    by_url = await request_to(router, "GET", f"/workers/{quote(mock.url, safe='')}")
    assert by_id.json == by_url.json and by_id.json["healthy"]
    assert (await request_to(router, "GET", "/workers")).json["workers"] == [by_id.json]
    assert (await request_to(router, "PATCH", made.headers["location"])).status == 405
    assert (await request_to(router, "DELETE", made.headers["location"] + "?force=maybe")).status == 400
    assert (await request_to(router, "DELETE", f"/workers/{quote(mock.url, safe='')}")).status == 202
    for method, name in (("GET", "999999"), ("DELETE", quote(mock.url, safe="")), ("POST", "no-such/drain")):
        assert (await request_to(router, method, f"/workers/{name}")).status == 404


async def test_drain_of_a_resource(start_router, worker, request_to):
    mock = await worker()
    router = await start_router(mock)
    (known,) = router.registry
    assert (await request_to(router, "POST", f"/workers/{known.id}/drain")).status == 200
    assert len(router.registry) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_half_that_is_removed_by_force_ends_its_pair(start_router, worker, script, connect, request_to, role):
    """The other worker of the pair is cancelled at once, and the request is tried elsewhere, where it can be."""
    mocks = {"prefill": [await worker(script.silence)], "decode": [await worker(script.silence)]}
    mocks[role].append(await worker(script.silence))
    router = await start_router(**mocks)
    client = await connect(router)
    client.send("POST", "/generate", b'{"text": "a"}')
    await script.until(lambda: all(any(mock.posts for mock in workers) for workers in mocks.values()))
    removed, remaining = sorted(mocks[role], key=lambda mock: -len(mock.posts))
    (other,) = mocks["decode" if role == "prefill" else "prefill"]
    assert (await request_to(router, "POST", f"/remove_worker?url={removed.url}&force=true")).status == 200
    await script.until(lambda: (removed.left, other.left) == (1, 1))
    await script.until(lambda: remaining.posts and len(other.posts) == 2)
    assert remaining.posts[0].json["bootstrap_room"] == other.posts[1].json["bootstrap_room"]
    assert remaining.posts[0].json["bootstrap_room"] != other.posts[0].json["bootstrap_room"]
    client.leave()


@pytest.mark.parametrize("pairs", [False, True])
async def test_a_router_starts_empty_and_fills(start_router, worker, script, chat, request_to, pairs):
    router = await start_router(wait=False, pd_disaggregation=pairs)
    assert (await request_to(router, "GET", "/readiness")).status == 503
    assert (await request_to(router, "GET", "/list_workers")).json == {"urls": [], "workers": []}
    assert (await chat(router)).status == 503
    for role in ("prefill", "decode") if pairs else ("regular",):
        mock = await worker()
        assert (await request_to(router, "POST", "/add_worker", {"url": mock.url, "role": role})).status == 200
    await script.until(lambda: router.registry.ready(pairs=pairs))
    assert (await request_to(router, "GET", "/readiness")).status == 200
    assert (await chat(router)).status == 200
    for shown in (await request_to(router, "GET", "/list_workers")).json["workers"]:
        assert shown["role"] in (("prefill", "decode") if pairs else ("regular",))
        assert shown | {"state": "healthy", "healthy": True, "load": 0, "circuit": "closed", "draining": False,
                        "cached_tokens": None, "dp_rank": None} == shown


async def test_how_far_a_worker_that_starts_is(start_router, worker, request_to, script):
    mock = await worker()
    mock.health, mock.health_body = 503, b'{"status": "starting", "stage": "downloading", "progress": 0.344}'
    router = await start_router(mock, wait=False)
    await script.until(lambda: [w.stage for w in router.registry] == ["downloading, 34%"])
    reply = await request_to(router, "GET", "/list_workers")
    assert reply.json["workers"][0]["stage"] == "downloading, 34%"
    mock.health_body = b'{"stage": 3, "progress": "much"}'
    await script.until(lambda: not any(w.stage for w in router.registry))
    mock.health = 200
    await script.until(lambda: router.registry.available("regular"))
    assert "stage" not in (await request_to(router, "GET", "/list_workers")).json["workers"][0]
