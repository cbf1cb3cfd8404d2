"""Outcomes of failed attempts: retried elsewhere, counted, relayed."""

from __future__ import annotations

import json

import pytest

BUSY = [408, 429, 503]


async def engine_dead(served):
    served.answer(503, b'{"error": {"code": "engine_dead"}}', extra=b"X-Baton-Engine: dead\r\n")


def previous_rooms(mock):
    return [json.loads(body).get("bootstrap_previous_room") for body in mock.bodies]


def rooms(mock):
    return [json.loads(body)["bootstrap_room"] for body in mock.bodies]


@pytest.mark.parametrize("status", BUSY)
async def test_a_busy_worker_is_skipped_and_its_circuit_stays_closed(start_router, worker, script, chat, status):
    busy = [await worker(script.status(status)) for _ in range(7)]  # more than --retry-max-retries
    free = await worker()
    router = await start_router(*busy, free, policy="round_robin", cb_failure_threshold=2,
                                retry_initial_backoff_ms=5000.0)
    assert [(await chat(router)).status for _ in range(20)] == [200] * 20
    assert {known.circuit.state for known in router.registry} == {"closed"}
    assert router.metrics.retries[f"status_{status}"] == sum(len(mock.posts) for mock in busy) > 0


@pytest.mark.parametrize("status", BUSY)
@pytest.mark.parametrize("given", [b"", b"Retry-After: 7\r\n"], ids=["unnamed", "named"])
async def test_busy_is_passed_on_with_retry_after_when_all_say_so(start_router, worker, chat, status, given):
    async def refuse(served):
        served.answer(status, b'{"error": "full"}', extra=given)

    workers = [await worker(refuse) for _ in range(3)]
    router = await start_router(*workers)
    for _ in range(4):  # a head that is known from the third on
        reply = await chat(router)
        assert (reply.status, reply.json, reply.complete) == (status, {"error": "full"}, True)
        assert reply.headers["retry-after"] == ("7" if given else "1")
    assert [len(mock.posts) for mock in workers] == [4, 4, 4]


async def test_without_retries_busy_is_passed_on_at_once(start_router, worker, script, chat):
    workers = [await worker(script.status(429)), await worker(script.status(429))]
    assert (await chat(await start_router(*workers, disable_retries=True))).status == 429
    assert sum(len(mock.posts) for mock in workers) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_busy_worker_of_a_pair_is_skipped(start_router, worker, script, chat, role):
    prefills, decodes = [await worker(), await worker()], [await worker(), await worker()]

    async def wait_for_prefill(served):  # as decode does: it has nothing to say before
        room = served.json["bootstrap_room"]
        await script.until(lambda: served.gone.is_set() or any(
            room in rooms(mock) for mock in prefills if mock.behaviour is script.answer))
        served.answer()

    for mock in decodes:
        mock.behaviour = wait_for_prefill
    (prefills if role == "prefill" else decodes)[0].behaviour = script.status(429)
    router = await start_router(prefill=prefills, decode=decodes, policy="round_robin", cb_failure_threshold=2)
    assert [(await chat(router)).status for _ in range(10)] == [200] * 10
    assert {known.circuit.state for known in router.registry} == {"closed"}


async def test_a_dead_engine_is_a_dead_worker(start_router, worker, chat, request_to):
    dead, good = await worker(engine_dead), await worker()
    router = await start_router(dead, good, policy="round_robin", health_check_interval_secs=60)
    assert [(await chat(router)).status for _ in range(6)] == [200] * 6
    assert len(dead.posts) == 1  # out of rotation at once, not after a row of failures


async def test_decode_alone_serves_when_the_only_prefill_engine_dies(start_router, worker, script, chat):
    """The API server of a dead engine answers for a moment longer: that is no better than none."""
    p = await worker(engine_dead, disaggregation_mode="prefill", stream_continuation=True)

    async def alone_or_wait(served):
        await (script.silence if "bootstrap_room" in served.json else script.answer)(served)

    d = await worker(alone_or_wait, disaggregation_mode="decode", stream_continuation=True)
    router = await start_router(prefill=[p], decode=[d], health_check_interval_secs=60)
    assert [(await chat(router)).status for _ in range(8)] == [200] * 8
    assert len(p.posts) == 1


@pytest.mark.parametrize("fresh", [True, False], ids=["first request", "after health checks"])
async def test_a_decode_killed_in_the_middle_is_not_asked_again(start_router, worker, script, chat, fresh):
    """Its connection had carried a health check before: that does not make its death a stale connection."""
    async def be_killed(served):
        victim = served.worker
        victim.server.close()
        for connection in list(victim.connections):
            connection.die()

    p = await worker(stream_continuation=True)
    victim, others = await worker(be_killed), [await worker() for _ in range(2)]
    router = await start_router(prefill=[p], decode=[victim, *others], policy="round_robin",
                                **({"health_check_interval_secs": 60} if fresh else {}))
    statuses = [(await chat(router)).status for _ in range(3)]
    assert statuses == [200] * 3
    assert len(victim.posts) == 1 and len(p.posts) == 4
    assert router.metrics.retries == {"decode_lost": 1}
    again = previous_rooms(p).index(rooms(victim)[0])
    assert again == rooms(p).index(rooms(victim)[0]) + 1  # the very next attempt names what prefill keeps


async def test_attempts_that_reach_no_decode_lose_no_retained_prompt(start_router, worker, script, chat):
    async def be_killed(served):
        for mock in (served.worker, *absent):
            mock.server.close()
            for connection in list(mock.connections):
                connection.die()

    p = await worker(stream_continuation=True)
    victim, absent, last = await worker(be_killed), [await worker() for _ in range(2)], await worker()
    router = await start_router(prefill=[p], decode=[victim, *absent, last], policy="least_loaded",
                                health_check_interval_secs=60, poison_refusal_secs=0)
    router.registry.record_check_failed = lambda known, **how: False  # only a check notices it
    order = [mock.url for mock in (victim, *absent, last)]
    for known in router.registry:
        known.load = order.index(known.url) if known.url in order else 0
    assert (await chat(router)).status == 200
    (first,) = rooms(victim)
    assert rooms(p)[0] == first and previous_rooms(p) == [None, first, first, first]
    assert rooms(last) == rooms(p)[-1:]
    for known in router.registry:
        known.load = 0


async def test_a_connection_that_the_worker_closes_as_it_idles_is_stale_still(start_router, worker, script, chat):
    async def close_once(served):
        await (script.die if len(d.posts) == 2 else script.answer)(served)

    p, d = await worker(), await worker(close_once)
    router = await start_router(prefill=[p], decode=[d], health_check_interval_secs=60)
    assert [(await chat(router)).status for _ in range(3)] == [200] * 3
    assert router.metrics.retries == {"decode_stale": 1}
    assert {known.state for known in router.registry} == {"healthy"}
