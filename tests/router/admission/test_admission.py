"""Admission: the pure rules on a clock of the test, then limits, queue and refusals over sockets."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from baton.common.api.errors import Overloaded
from baton.router.admission.admission import Admission, Permit, QueueTimeout
from baton.router.admission.limits import TokenBucket, TtftEstimate, load_of
from baton.router.config.admission import AdmissionRules


class Scene:
    """An admission, its clock, and what became of those that waited."""

    def __init__(self, **rules):
        self.now = 0.0
        self.admission = Admission(AdmissionRules(**rules), lambda: self.now)
        self.started: dict[str, Permit] = {}
        self.refused: dict[str, Exception] = {}

    def enter(self, name="", key=b"", streamed=False, priority=0, **wants):
        return self.admission.acquire(
            key, streamed, lambda: priority, lambda permit: self.started.update({name: permit}),
            lambda error: self.refused.update({name: error}), **wants)


class Body:
    """The memory that a waiting request refers to."""

    def start(self, permit):
        self.permit = permit

    def refuse(self, error):
        raise AssertionError("no request waits too long")


def test_the_limit_is_exact_and_the_queue_goes_by_priority_then_arrival():
    scene = Scene(max_concurrent=2, queue_size=4)
    permits = [scene.enter() for _ in range(2)]
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        scene.enter(name, priority=priority)
    with pytest.raises(Overloaded):
        scene.enter()
    permits.pop().release()
    assert list(scene.started) == ["b"]
    for permit in (permits.pop(), scene.started["b"]):
        permit.release()
    assert list(scene.started) == ["b", "d", "a"]
    assert (scene.admission.running, scene.admission.queued) == (2, 1)


def test_a_thousand_waiting_requests_that_fail_at_once_do_not_pile_up():
    scene = Scene(max_concurrent=1, queue_size=2000)
    first, ended = scene.enter(), []

    def fail(permit):
        ended.append(permit)
        permit.release()

    for _ in range(2000):
        scene.admission.acquire(b"", False, lambda: 0, fail, lambda error: None)
    first.release()
    assert (len(ended), scene.admission.running, scene.admission.queued) == (2000, 0, 0)


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "served"])
def test_requests_that_waited_are_freed(leaves):
    """Each would keep its body: where clients come and go at a full router, that is all of its memory."""
    scene, refs = Scene(max_concurrent=1, queue_size=4), []
    last = scene.enter()
    urgent = scene.enter("urgent", priority=9) if leaves else None
    for _ in range(1000):
        body = Body()
        waiting = scene.admission.acquire(b"", False, lambda: 0, body.start, body.refuse)
        refs.append(weakref.ref(body))
        if leaves:
            waiting.cancel()
        else:
            last.release()
            last = body.permit
        del body, waiting
    assert sum(ref() is not None for ref in refs) < 100
    assert scene.admission.queued == (urgent is not None)


def test_waiting_ends_in_time_and_who_left_is_skipped():
    scene = Scene(max_concurrent=1, queue_size=9, queue_timeout=10.0)
    permit = scene.enter()
    scene.enter("early")
    scene.now = 4.0
    gone = scene.enter("gone")
    scene.enter("late")
    assert scene.admission.expire() == 10.0
    gone.cancel()
    scene.now = 10.0
    assert scene.admission.expire() == 14.0
    assert isinstance(scene.refused["early"], QueueTimeout) and scene.refused["early"].retry_after
    permit.release()
    assert list(scene.started) == ["late"]
    assert scene.admission.expire() is None


def test_bucket():
    bucket = TokenBucket(4.0, 0.0)
    for _ in range(4):
        assert bucket.wait(0.0) == 0
        bucket.take()
    assert bucket.wait(0.0) == pytest.approx(0.25)
    assert bucket.wait(0.25) == 0
    slow = TokenBucket(0.1, 0.0)
    slow.take()
    assert slow.wait(0.0) == pytest.approx(10.0) and slow.wait(10.0) == 0


def test_rates_say_when_to_retry_and_a_refused_request_costs_nothing():
    scene = Scene(rate=2.0, rate_per_key=1.0)
    scene.enter(key=b"a")
    for _ in range(5):
        with pytest.raises(Overloaded) as refusal:
            scene.enter(key=b"a")
        assert refusal.value.retry_after == pytest.approx(1.0)
    scene.enter(key=b"b")  # the second of the two that all may send
    with pytest.raises(Overloaded):
        scene.enter(key=b"c")
    assert scene.admission.refused["key"] == 5 and scene.admission.refused["rate"] == 1


def test_a_key_has_its_own_share():
    scene = Scene(max_concurrent_per_key=2)
    permits = [scene.enter(key=b"a") for _ in range(2)]
    with pytest.raises(Overloaded):
        scene.enter(key=b"a")
    scene.enter(key=b"b")
    permits[0].release()
    scene.enter(key=b"a")


def test_keys_that_are_done_are_forgotten(monkeypatch):
    monkeypatch.setattr("baton.router.admission.admission._MAX_KEYS", 50)
    scene = Scene(max_concurrent_per_key=2)
    busy = scene.enter(key=b"busy")
    for i in range(1000):
        scene.enter(key=b"%d" % i).release()
    shares = scene.admission._state._shares
    assert len(shares) <= 51 and b"busy" in shares
    busy.release()


def test_estimate_grows_with_those_that_wait_and_shrinks_with_parallel_workers():
    estimate = TtftEstimate()
    assert estimate.next() == 0
    position = estimate.begin()
    estimate.observe(position, 0.2)
    assert estimate.next() == pytest.approx(0.4)
    estimate.begin()
    assert estimate.next() == pytest.approx(0.6)
    for _ in range(100):
        estimate.observe(8, 0.2)
    assert estimate.next() == pytest.approx(3 * 0.025, rel=0.01)


def test_slo_refuses_what_would_come_too_late_and_recovers():
    scene = Scene(slo_ttft=1.0)
    permit = scene.enter(streamed=True)
    scene.now = 0.4
    permit.first_token()  # 0.4 s a waiting request
    permits = [scene.enter(streamed=True) for _ in range(2)]
    with pytest.raises(Overloaded) as refusal:
        scene.enter(streamed=True)
    assert refusal.value.retry_after == pytest.approx(0.2)
    scene.enter(streamed=False)  # has no first token to see
    scene.now = 60.4
    for late in permits:
        late.first_token()
    assert isinstance(scene.enter(streamed=True), Permit)  # no request waits: always admitted


def test_a_request_with_an_objective_of_its_own_is_refused_by_it():
    """Long prompts make others wait longer, and wait longer themselves."""
    scene = Scene(slo_of_requests=True)
    permit = scene.enter(streamed=True, slo=0.1, load=4)
    scene.now = 0.8
    permit.first_token()  # 0.2 s a unit
    scene.enter(streamed=True, load=9)  # has no objective
    assert isinstance(scene.enter(streamed=True, slo=2.1, load=1), Permit)
    with pytest.raises(Overloaded, match=r"after about 2\.8 s, later than its slo_ttft_ms of 2000") as refusal:
        scene.enter(streamed=True, slo=2.0, load=4)
    assert refusal.value.retry_after == pytest.approx(0.8) and scene.admission.refused["slo"] == 1
    assert [load_of(tokens) for tokens in (0, 2047, 2048, 20_480)] == [1, 1, 2, 11]


# ---------------------------------------------------------------------- over sockets


async def test_concurrency_is_exact(start_router, worker, script, chat, request_to):
    running = most = 0

    async def count(served):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        served.answer()

    router = await start_router(await worker(count), max_concurrent_requests=4)
    replies = await asyncio.gather(*(chat(router) for _ in range(40)))
    assert ({reply.status for reply in replies}, most) == ({200}, 4)
    assert b"baton_router_running_requests 0.0" in (await request_to(router, "GET", "/metrics")).body


async def test_queue_answers_429_when_full_and_408_in_time(start_router, worker, script, chat, connect):
    mock = await worker(script.silence)
    router = await start_router(mock, max_concurrent_requests=1, queue_size=1, queue_timeout_secs=0.2)
    client = await connect(router)
    client.send("POST", "/generate", b"{}")
    await script.until(lambda: mock.posts)
    waiting = asyncio.ensure_future(chat(router))
    await asyncio.sleep(0.05)
    full = await chat(router)
    late = await waiting
    assert [(reply.status, reply.headers["retry-after"]) for reply in (full, late)] == [(429, "1"), (408, "1")]
    client.leave()
    await script.until(lambda: mock.left == 1)
    mock.behaviour = script.answer
    assert (await chat(router)).status == 200


async def test_the_queue_goes_by_priority(start_router, worker, script, connect):
    mock = await worker(script.silence)
    router = await start_router(mock, max_concurrent_requests=1)
    first, *others = [await connect(router) for _ in range(5)]
    first.send("POST", "/generate", b"{}")
    await script.until(lambda: mock.posts)
    mock.behaviour = script.answer
    others[0].send("POST", "/generate", b'{"text": "low"}')
    others[1].send("POST", "/generate", b'{"text": "body", "priority": 2}')
    others[2].send("POST", "/generate", b'{"text": "header", "priority": -9}', "X-Priority: 7\r\n")
    others[3].send("POST", "/generate", b'{"text": "gone", "priority": 9}')
    await script.until(lambda: router._gate.admission.queued == 4)
    others[3].leave()
    await script.until(lambda: router._gate.admission.queued == 3)
    first.leave()
    for client in others[:3]:
        assert (await client.reply()).status == 200
    assert [served.json["text"] for served in mock.posts[1:]] == ["header", "body", "low"]


async def test_keys_are_distinguished(start_router, worker, chat, request_to):
    router = await start_router(await worker(), rate_limit_per_key=1.0)
    bearers = ("Authorization: Bearer a\r\n", "Authorization: Bearer b\r\n", "Authorization: Bearer a\r\n")
    replies = [await request_to(router, "POST", "/generate", b"{}", bearer) for bearer in bearers]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[2].headers["retry-after"] == "1"


async def test_questions_are_not_counted(start_router, worker, request_to):
    router = await start_router(await worker(), rate_limit_tokens_per_second=1.0)
    assert {(await request_to(router, "GET", "/v1/models")).status for _ in range(5)} == {200}


async def test_all_limits_off_means_no_gate(start_router, worker, chat):
    router = await start_router(await worker(), max_concurrent_requests=0)
    assert router._gate is None and (await chat(router)).status == 200


async def test_requests_say_when_they_want_their_first_token(start_router, worker, chat, request_to):
    router = await start_router(await worker(), enable_slo_admission=True)
    estimate = router._gate.admission.ttft
    estimate.observe(estimate.begin(), 2.0)
    refused = await chat(router, stream=True, slo_ttft_ms=500)
    assert refused.status == 429 and float(refused.headers["retry-after"]) >= 1
    assert refused.error["message"] == ("The first token would come after about 4.0 s, later than its slo_ttft_ms of "
                                        "500.")
    for slo, status in (("500", 429), ("60000", 200)):
        reply = await request_to(router, "POST", "/v1/chat/completions",
                                 {"messages": [{"role": "user", "content": "hi"}], "stream": True},
                                 headers=f"x-slo-ttft-ms: {slo}\r\n")
        assert reply.status == status
    assert (await chat(router, slo_ttft_ms=500)).status == 200, "an answer in one piece has no first token to see"
