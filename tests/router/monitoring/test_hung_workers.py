"""Workers that stand still with their connections open: noticed by their health checks, and left by their requests."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from baton.tests.router.relay.test_continuation import COUNT, GREEDY, OURS, counting, hang, tokens_of

QUICK = {"health_check_timeout_secs": 0.1}


async def test_a_stream_of_a_hung_worker_goes_on_elsewhere(start_router, worker, chat):
    bad, good = await worker(counting(until=3, then="hang"), **OURS), await worker(counting(), **OURS)
    router = await start_router(bad, good, policy="round_robin", **QUICK)
    for _ in range(2):
        reply = await chat(router, **GREEDY)
        assert reply.complete and tokens_of(reply) == list(range(COUNT))
    assert (router.metrics.continued_streams, bad.left) == (1, 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stream_leaves_a_hung_worker_of_its_pair(start_router, worker, script, chat, role):
    """Decode in the middle of its stream; prefill before the first byte, which decode waits for."""
    prefills, decodes = [await worker(**OURS) for _ in range(2)], [await worker(counting(), **OURS) for _ in range(2)]
    if role == "decode":
        decodes[0].behaviour = counting(until=3, then="hang")
    else:
        prefills[0].behaviour = hang

        async def wait_for_prefill(served):
            done = {json.loads(body)["bootstrap_room"] for body in prefills[1].bodies}
            await (counting()(served) if served.json["bootstrap_room"] in done else script.silence(served))

        async def prefill(served):
            await asyncio.sleep(0.01)
            served.answer()

        prefills[1].behaviour = prefill
        for mock in decodes:
            mock.behaviour = wait_for_prefill
    router = await start_router(prefill=prefills, decode=decodes, policy="round_robin", **QUICK)
    for known in router.registry:
        known.is_baton = True
    for _ in range(2):
        reply = await chat(router, **GREEDY)
        assert reply.complete and tokens_of(reply) == list(range(COUNT))
    assert (prefills if role == "prefill" else decodes)[0].left == 1


async def test_calls_that_reach_a_hung_worker_late_are_tried_elsewhere(start_router, worker, chat, script):
    """The last of them meets a worker that is about to be taken out, and has not been silent for long then."""
    bad, good = await worker(hang), await worker()
    router = await start_router(bad, good, policy="round_robin", **QUICK)
    known = next(known for known in router.registry if known.url == bad.url)
    asked = []
    while known.state == "healthy":
        assert len(asked) < 500
        asked.append(asyncio.ensure_future(chat(router)))
        await asyncio.sleep(0.01)
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}


async def test_a_worker_that_wakes_up_gets_requests_again_and_its_late_bytes_are_dropped(
        start_router, worker, chat, script):
    woken = asyncio.Event()

    async def sleep_once(served):
        if len(bad.posts) > 1:
            served.answer(body=b'{"on": "time"}')
            return
        bad.handle, awake = hang, bad.handle
        await woken.wait()
        bad.handle = awake
        served.answer(body=b'{"too": "late"}')

    bad, good = await worker(sleep_once), await worker()
    router = await start_router(bad, good, policy="round_robin", **QUICK)
    assert [(await chat(router)).json for _ in range(2)] == [{"ok": True}] * 2
    assert len(bad.posts) == 1
    woken.set()
    await script.until(lambda: len(router.registry.available("regular")) == 2)
    assert {json.dumps((await chat(router)).json) for _ in range(6)} == {'{"ok": true}', '{"on": "time"}'}


async def test_a_busy_worker_that_goes_on_talking_is_not_hung(start_router, worker, chat, script):
    """It is late with its health checks only: it stays, and so do its answers, silent ones too."""
    async def talk(served):
        if b"quiet" in served.body:
            await asyncio.sleep(1.0)
            served.answer()
            return
        served.head()
        for _ in range(50):
            served.event("{}")
            await asyncio.sleep(0.02)
        served.end()

    mock = await worker(talk)
    router = await start_router(mock, **QUICK)
    handle = mock.handle

    async def late(served):
        await (script.silence if served.target == b"/health" else handle)(served)

    mock.handle = late
    talking = asyncio.ensure_future(chat(router, stream=True))
    await script.until(lambda: mock.posts)
    quiet = await chat(router, messages=[{"role": "user", "content": "quiet"}])
    assert (quiet.status, (await talking).complete) == (200, True)
    assert len(mock.posts) == 2


async def test_a_router_that_stood_still_itself_blames_no_worker(start_router, worker, chat, script):
    async def slow_health(served):
        await asyncio.sleep(0.03)
        served.answer()

    mock = await worker(script.silence)
    router = await start_router(mock, health_check_interval_secs=0.01, health_failure_threshold=1, **QUICK)
    (known,) = router.registry
    asked = []

    async def note(served):
        asked.append(served)
        await slow_health(served)

    mock.handle = note
    while len(asked) < 3:
        begun = len(asked)
        await script.until(lambda begun=begun: len(asked) > begun)
        time.sleep(0.5)  # noqa: ASYNC251 worker and router share this thread: the answer comes after the timer
        await asyncio.sleep(0.1)
        assert known.state == "healthy" and not known.hung


async def test_a_worker_without_answers_to_checks_alone_keeps_its_long_streams(start_router, worker, chat, script):
    """Refusing its checks is no silence: a server that stops says 503, and ends what it has."""
    gate = asyncio.Event()

    async def slow(served):
        served.head()
        await gate.wait()
        served.event("[DONE]")
        served.end()

    mock = await worker(slow)
    router = await start_router(mock, **QUICK)
    asked = asyncio.ensure_future(chat(router, stream=True))
    await script.until(lambda: mock.posts)
    mock.health = 503
    await script.until(lambda: not router.registry.available("regular"))
    router.dispatcher.sweep(0)
    gate.set()
    assert (await asked).complete
