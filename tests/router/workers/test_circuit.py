"""Circuit breakers: the pure automaton, and a router whose workers fail requests while they pass health checks."""

from __future__ import annotations

import asyncio

import pytest

from baton.router.config.circuit import CircuitRules
from baton.router.workers.circuit import Circuit

RULES = CircuitRules(failure_threshold=3, success_threshold=2, timeout=10.0, window=5.0)
QUICK = {"cb_failure_threshold": 3, "cb_success_threshold": 2, "cb_timeout_duration_secs": 0.2, "retry_max_retries": 0}


def opened() -> Circuit:
    circuit = Circuit(RULES)
    assert [circuit.record_failure(now) for now in (0.0, 1.0, 2.0)] == [False, False, True]
    return circuit


def test_opens_after_failures_in_a_row():
    circuit = Circuit(RULES)
    circuit.record_failure(0.0), circuit.record_failure(1.0)
    circuit.record_success()
    assert not circuit.record_failure(2.0) and not circuit.record_failure(3.0)
    assert circuit.record_failure(4.0)
    assert (circuit.state, circuit.admits) == ("open", False)


def test_failures_outside_the_window_do_not_count():
    circuit = Circuit(RULES)
    assert not any(circuit.record_failure(now) for now in (0.0, 4.0, 8.0, 12.0))
    assert circuit.record_failure(12.5)


def test_half_open_after_the_timeout_then_closed_or_open_again():
    circuit = opened()
    assert not circuit.try_half_open(11.9)
    assert circuit.try_half_open(12.0)
    assert circuit.admits
    assert circuit.record_failure(12.1) and circuit.state == "open"
    assert not circuit.try_half_open(22.0)
    assert circuit.try_half_open(22.1)
    assert not circuit.record_success()
    assert circuit.record_success()
    assert (circuit.state, circuit.troubled) == ("closed", False)


def test_late_news_of_an_open_circuit_changes_nothing():
    circuit = opened()
    assert not circuit.record_failure(9.0) and not circuit.record_success()
    assert circuit.try_half_open(12.0)


def test_disabled_never_opens():
    circuit = Circuit(CircuitRules(failure_threshold=1, enabled=False))
    assert not circuit.record_failure(0.0) and circuit.admits


# ---------------------------------------------------------------------- over sockets


async def shown(router, request_to):
    return [worker["circuit"] for worker in (await request_to(router, "GET", "/list_workers")).json["workers"]]


async def test_a_client_s_mistakes_never_open_a_circuit(start_router, worker, script, chat, request_to):
    router = await start_router(await worker(script.status(400)), **QUICK)
    assert {(await chat(router)).status for _ in range(20)} == {400}
    assert await shown(router, request_to) == ["closed"]


@pytest.mark.parametrize("failure", ["die", "status_500"])
async def test_a_failing_worker_is_left_alone_then_probed(start_router, worker, script, chat, request_to, failure):
    bad = await worker(script.die if failure == "die" else script.status(500))
    router = await start_router(bad, **QUICK)
    for _ in range(3):
        await chat(router)
    posts = len(bad.posts)
    assert {(await chat(router)).status for _ in range(3)} == {503}
    assert len(bad.posts) == posts
    assert await shown(router, request_to) == ["open"]
    assert (await request_to(router, "GET", "/readiness")).status == 503
    metrics = (await request_to(router, "GET", "/metrics")).body.decode()
    assert f'baton_router_worker_circuit_state{{role="regular",worker="{bad.url}"}} 1.0' in metrics
    assert f'baton_router_circuits_opened_total{{worker="{bad.url}"}} 1.0' in metrics

    await asyncio.sleep(0.25)
    assert await shown(router, request_to) == ["half_open"]
    assert (await chat(router)).status != 200  # the probe fails: open again at once
    assert await shown(router, request_to) == ["open"]
    bad.behaviour = script.answer
    await asyncio.sleep(0.25)
    assert [(await chat(router)).status for _ in range(2)] == [200, 200]
    assert await shown(router, request_to) == ["closed"]


async def test_half_open_means_one_request_at_a_time(start_router, worker, script, chat):
    bad = await worker(script.status(500))
    router = await start_router(bad, **QUICK)
    for _ in range(3):
        await chat(router)
    await asyncio.sleep(0.25)
    gate = asyncio.Event()

    async def wait(served):
        await gate.wait()
        served.answer()

    bad.behaviour = wait
    probe = asyncio.ensure_future(chat(router))
    await script.until(lambda: len(bad.posts) == 4)
    assert [(await chat(router)).status for _ in range(3)] == [503] * 3
    gate.set()
    assert (await probe).status == 200
    assert (await chat(router)).status == 200


async def test_a_probe_that_its_client_leaves_makes_room_for_the_next(start_router, worker, script, chat, connect):
    bad = await worker(script.status(500))
    router = await start_router(bad, **QUICK)
    for _ in range(3):
        await chat(router)
    await asyncio.sleep(0.25)
    bad.behaviour = script.silence
    client = await connect(router)
    client.send("POST", "/generate", b'{"text": "a"}')
    await script.until(lambda: len(bad.posts) == 4)
    client.leave()
    await script.until(lambda: bad.left == 1)
    bad.behaviour = script.answer
    assert (await chat(router)).status == 200


async def test_requests_go_round_an_open_circuit(start_router, worker, script, chat):
    bad, good = await worker(script.status(500)), await worker()
    router = await start_router(bad, good, policy="round_robin", **{**QUICK, "retry_max_retries": 3})
    assert [(await chat(router)).status for _ in range(20)] == [200] * 20
    assert len(bad.posts) == 3


async def test_a_restarted_worker_starts_with_a_closed_circuit(start_router, worker, script, chat):
    mock = await worker(script.die)
    router = await start_router(mock, **{**QUICK, "cb_timeout_duration_secs": 60.0})
    for _ in range(3):
        await chat(router)
    await mock.stop()
    (known,) = router.registry
    await script.until(lambda: known.state == "unhealthy")
    mock.behaviour = script.answer
    await mock.start()
    await script.until(lambda: router.registry.ready(pairs=False), 2.0)
    assert (await chat(router)).status == 200


async def test_failed_transfers_open_no_circuit_of_the_worker_that_reports_them(start_router, worker, script, chat):
    p, d = await worker(script.silence), await worker(script.status(502))
    router = await start_router(prefill=[p], decode=[d], **QUICK)
    for _ in range(5):
        assert (await chat(router)).status == 502
    assert len(d.posts) == 5


async def test_disabled(start_router, worker, script, chat):
    bad = await worker(script.status(500))
    router = await start_router(bad, **QUICK, disable_circuit_breaker=True)
    assert [(await chat(router)).status for _ in range(6)] == [500] * 6


@pytest.mark.parametrize("pairs", [False, True], ids=["whole", "pairs"])
async def test_a_request_that_all_workers_fail_opens_no_circuit(start_router, worker, script, chat, request_to, pairs):
    """One that another worker serves counts against those that did not."""
    async def fail_odd(served):
        served.answer(500 if served.json["n"] == 2**64 else 200)

    def fail_also(served):
        served.answer(500 if served.json["n"] >= 2**63 else 200)

    async def stricter(served):
        fail_also(served)

    workers = [await worker(fail_odd), await worker(stricter)]
    rules = {**QUICK, "retry_max_retries": 3, "policy": "round_robin", "cb_timeout_duration_secs": 60}
    prefill = {"prefill": [await worker()], "decode": workers} if pairs else {}
    router = await start_router(*(() if pairs else workers), **prefill, **rules)
    assert {(await chat(router, n=2**64)).status for _ in range(20)} == {500}
    assert set(await shown(router, request_to)) == {"closed"}
    assert {(await chat(router, n=2**63)).status for _ in range(20)} == {200}
    assert sorted(await shown(router, request_to)) == [*["closed"] * (len(router.registry) - 1), "open"]
