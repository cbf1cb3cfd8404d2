"""Requests that kill workers: two die at most, and no request that ran next to them is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.router.relay import poison_guard
from baton.router.relay.poison_guard import fingerprint
from baton.tests.router.relay.test_continuation import COUNT, OURS, chunk, event, tokens_of

POISON = [{"role": "user", "content": "poison"}]
CODE = "poison_request"


async def kill(mock):
    """As SIGKILL does: the port is closed, and all connections are reset."""
    mock.dead = mock.stopped = True
    mock.server.close()
    for connection in list(mock.connections):
        connection.die()


def mortal(*, how="killed", after=0.02, takes=0.3, late=False):
    """Dies of poison, after a moment; answers all else in time. ``late``: a dead engine's API server says so last."""

    async def behave(served):
        mock = served.worker
        if b"poison" in served.body:
            await asyncio.sleep(after)
            if how == "engine":
                mock.dead = True
                await asyncio.sleep(0.1 if late else 0)  # its API server does not know it yet
                mock.behaviour = last_words
                mock.health = 503
                mock.dying.set()
            else:
                await kill(mock)
                return
        await asyncio.wait([asyncio.ensure_future(mock.dying.wait())], timeout=takes)
        await (last_words if mock.dying.is_set() else answer)(served)

    return behave


async def answer(served):
    if not served.gone.is_set():
        served.worker.answered.update(rooms(served.worker) & {served.json.get("bootstrap_room")})
        served.answer()


def rooms(mock):
    return {json.loads(body).get("bootstrap_room") for body in mock.bodies}


async def last_words(served):
    if not served.gone.is_set():
        served.answer(503, b'{"error": {"code": "engine_dead"}}', extra=b"X-Baton-Engine: dead\r\n")


def counting(*, kills_at=None, pause=0.03):
    """Streams tokens as our servers do; dies of poison before token ``kills_at``."""

    async def behave(served):
        begun = served.json.get("continuation", {}).get("token_ids", [])
        served.head()
        for token in range(len(begun), COUNT):
            if b"poison" in served.body and token == kills_at:
                await kill(served.worker)
                return
            served.write(chunk(event(token)))
            await asyncio.sleep(pause)
        served.event("[DONE]")
        served.end()

    return behave


@pytest.fixture
def pool(worker):
    """``await pool(count, behaviour)`` starts mortal workers."""

    async def start(count, behaviour, **info):
        made = [await worker(behaviour, **info) for _ in range(count)]
        for mock in made:
            mock.dead, mock.dying, mock.answered = False, asyncio.Event(), set()
        return made

    return start


def dead(workers):
    return sum(mock.dead for mock in workers)


def ask(chat, router, text, **fields):
    return asyncio.ensure_future(chat(router, messages=[{"role": "user", "content": text}], **fields))


def assert_refused(reply):
    assert (reply.status, reply.error["code"]) == (400, CODE), reply.body
    assert reply.error["type"] == "invalid_request_error"


# ---------------------------------------------------------------------- whole workers


@pytest.mark.parametrize("how", ["killed", "engine"])
async def test_poison_kills_two_of_a_pool_and_all_requests_next_to_it_are_answered(start_router, chat, pool, how):
    workers = await pool(4, mortal(how=how))
    router = await start_router(*workers, policy="round_robin")
    innocents = [ask(chat, router, f"hello {number}") for number in range(12)]
    killer = ask(chat, router, "poison")
    innocents += [ask(chat, router, f"bye {number}") for number in range(12)]
    assert_refused(await killer)
    assert [(await reply).status for reply in innocents] == [200] * 24
    assert dead(workers) == 2
    assert router.metrics.poison_requests == 1


async def test_its_like_is_refused_for_a_while_whatever_ids_it_carries(start_router, chat, pool, script):
    workers = await pool(3, mortal())
    router = await start_router(*workers, policy="round_robin", poison_refusal_secs=1.0)
    assert_refused(await chat(router, messages=POISON))
    for ids in ({"rid": "a"}, {"user": "b", "metadata": {"try": 2}}):
        assert_refused(await chat(router, messages=POISON, **ids))
    assert (dead(workers), router.metrics.poison_requests) == (2, 3)
    assert (await chat(router)).status == 200
    await script.until(lambda: not router.dispatcher.poison.records)
    assert (await chat(router, messages=POISON)).status != 400 and dead(workers) == 3


async def test_poison_in_streams_next_to_others_that_are_continued(start_router, chat, pool):
    workers = await pool(4, counting(kills_at=3), **OURS)
    router = await start_router(*workers, policy="round_robin")
    innocents = [ask(chat, router, f"hello {number}", stream=True, temperature=0) for number in range(12)]
    killer = await ask(chat, router, "poison", stream=True, temperature=0)
    assert CODE in killer.body.decode() and killer.body.count(b'"token_ids"') >= 3
    for reply in innocents:
        assert tokens_of(await reply) == list(range(COUNT))
    assert dead(workers) == 2


@pytest.mark.parametrize("how", ["killed", "engine"])
async def test_poison_in_streams_that_cannot_be_continued_is_known_when_its_client_tries_again(
        start_router, chat, pool, script, how):
    async def end_in_the_middle(served):
        if b"poison" not in served.body:
            served.answer()
            return
        served.head()
        served.write(chunk(event(0)))
        await asyncio.sleep(0.02)
        if how == "killed":
            await kill(served.worker)
            return
        served.worker.dead = True
        served.worker.behaviour, served.worker.health = last_words, 503
        served.event('{"error":{"message":"Rank 0 died.","code":"engine_dead"}}')
        served.end()

    workers = await pool(4, end_in_the_middle)
    router = await start_router(*workers, policy="round_robin")
    first = await chat(router, messages=POISON, stream=True, rid="try 0")
    await script.until(lambda: router.dispatcher.poison.records)
    second = await chat(router, messages=POISON, stream=True, rid="try 1")
    assert first.status == 200 and (CODE if how == "killed" else "engine_dead") in second.body.decode()
    assert_refused(await chat(router, messages=POISON, stream=True, rid="try 2"))
    assert dead(workers) == 2
    assert [(await chat(router)).status for _ in range(6)] == [200] * 6


async def test_a_small_pool_is_not_emptied_by_retries(start_router, chat, pool):
    workers = await pool(2, mortal())
    router = await start_router(*workers)
    assert_refused(await chat(router, messages=POISON))
    assert dead(workers) == 2  # one other at most was all there was


async def test_without_health_checks_a_worker_lives_that_accepts_connections(start_router, chat, pool, worker, script):
    workers = [*await pool(4, mortal()), await worker(script.die)]
    router = await start_router(*workers, policy="round_robin", disable_health_check=True)
    assert_refused(await chat(router, messages=POISON))
    assert dead(workers[:4]) == 2
    for _ in range(6):
        assert (await chat(router)).status == 200


async def test_no_request_is_suspected_with_seconds_of_0(start_router, chat, pool):
    workers = await pool(3, mortal())
    router = await start_router(*workers, poison_refusal_secs=0)
    assert (await chat(router, messages=POISON)).status == 503
    assert dead(workers) == 3 and not router.dispatcher.poison.records


# ---------------------------------------------------------------------- innocents alone


async def test_an_operator_s_kills_refuse_no_request(start_router, chat, pool):
    """Forty clients without a pause, while two of four workers are killed one after the other."""
    workers = await pool(4, mortal(takes=0.2))
    router = await start_router(*workers, policy="round_robin")
    loop = asyncio.get_running_loop()
    begun, statuses = loop.time(), []

    async def client(number):
        while loop.time() < begun + 2.6:
            statuses.append((await chat(router, messages=[{"role": "user", "content": f"hello {number}"}])).status)

    clients = [asyncio.ensure_future(client(number)) for number in range(40)]
    for mock, when in zip(workers, (0.3, 2.3)):
        await asyncio.sleep(begun + when - loop.time())
        await kill(mock)
    await asyncio.gather(*clients)
    assert set(statuses) == {200} and len(statuses) > 80
    assert router.metrics.poison_requests == 0


@pytest.mark.parametrize("from_record", [False, True], ids=["retried", "sent again"])
async def test_engines_that_die_together_refuse_no_request_though_one_death_is_noticed_later(
        start_router, chat, pool, script, from_record):
    """The second engine is dead when the suspect would go there, but its API server does not know it yet."""

    async def wait_for_death(served):
        await served.worker.dying.wait()
        await last_words(served)

    def die(mock):
        mock.behaviour, mock.health = last_words, 503
        mock.dying.set()

    def state_of(mock):
        return next(known.state for known in router.registry if known.url == mock.url)

    *both, spare = await pool(3, wait_for_death, **OURS)
    router = await start_router(*both, spare, policy="round_robin")
    spare.behaviour, spare.health = answer, 503
    await script.until(lambda: state_of(spare) != "healthy")
    asked = ask(chat, router, "hello")
    await script.until(lambda: both[0].posts or both[1].posts)
    first, second = both if both[0].posts else reversed(both)
    if from_record:
        asked.cancel()
        body = first.posts[0].body
        router.dispatcher.poison.learn(
            poison_guard.Deaths(fingerprint(b"/v1/chat/completions", body), "regular", 1, 0.1, 60.0))
    second.engine_answers = False
    die(first)
    if from_record:
        await script.until(lambda: state_of(first) != "healthy")
        asked = ask(chat, router, "hello")
    await script.until(lambda: second.engine_asked or second.posts)
    spare.health = 200
    await script.until(lambda: state_of(spare) == "healthy")
    die(second)
    assert (await asked).status == 200
    assert spare.posts and not second.posts and router.metrics.poison_requests == 0


async def test_a_long_stream_outlives_many_kills(start_router, chat, pool, script, monkeypatch):
    """It is continued each time for longer than a killer takes to kill."""
    monkeypatch.setattr(poison_guard, "_OUTLIVED_SECONDS", 0.1)
    monkeypatch.setattr(poison_guard, "_MAX_CONTINUED_AGE_SECONDS", 0.05)
    workers = await pool(6, counting(pause=0.3), **OURS)
    router = await start_router(*workers, policy="round_robin")
    asked = ask(chat, router, "hello", stream=True, temperature=0)

    def running():
        return next((mock for mock in workers if not mock.dead and any(
            known.url == mock.url and known.load for known in router.registry)), None)

    for _ in range(4):
        await script.until(running)
        await asyncio.sleep(0.4)
        await kill(running())
    assert tokens_of(await asked) == list(range(COUNT))
    assert dead(workers) == 4


async def test_connections_that_break_under_workers_that_live_are_no_deaths(start_router, chat, worker, script):
    workers = [await worker(script.die) for _ in range(5)] + [await worker()]
    router = await start_router(*workers, policy="round_robin", retry_max_retries=20, disable_circuit_breaker=True)
    for _ in range(3):
        assert (await chat(router)).status == 200
    assert not router.dispatcher.poison.records


async def test_the_same_request_of_many_clients_is_answered_when_one_worker_is_killed(start_router, chat, pool, script):
    workers = await pool(3, mortal(takes=0.2))
    router = await start_router(*workers, policy="round_robin")
    asked = [ask(chat, router, "ping") for _ in range(30)]
    await asyncio.sleep(0.1)
    await kill(workers[0])
    asked += [ask(chat, router, "ping") for _ in range(30)]
    assert [(await reply).status for reply in asked] == [200] * 60
    await script.until(lambda: not router.dispatcher.poison.records)


# ---------------------------------------------------------------------- pairs


@pytest.mark.parametrize("how", ["killed", "engine"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("reported_by_peer", [False, True], ids=["itself", "peer"])
async def test_poison_kills_two_of_one_role(start_router, chat, pool, script, role, how, reported_by_peer):
    """Decode waits for prefill, as it does; where it learns of the death first, it answers 502."""
    prefills = await pool(
        4, mortal(how=how, takes=0.1, late=reported_by_peer) if role == "prefill" else answer, **OURS)

    async def decode(served):
        room = served.json.get("bootstrap_room")
        while role == "prefill" and room is not None and not any(room in mock.answered for mock in prefills):
            peer = next((mock for mock in prefills if room in rooms(mock)), None)
            if served.gone.is_set():
                return
            if peer is not None and peer.dead:
                if reported_by_peer:
                    served.answer(502)
                else:
                    await script.silence(served)
                return
            await asyncio.sleep(0.002)
        await mortal(how=how, takes=0.1)(served) if role == "decode" else served.answer()

    decodes = await pool(4, decode, **OURS)
    router = await start_router(prefill=prefills, decode=decodes, policy="round_robin")
    innocents = [ask(chat, router, f"hello {number}") for number in range(10)]
    killer = ask(chat, router, "poison")
    innocents += [ask(chat, router, f"bye {number}") for number in range(10)]
    assert_refused(await killer)
    assert [(await reply).status for reply in innocents] == [200] * 20
    assert (dead(prefills), dead(decodes)) == ((2, 0) if role == "prefill" else (0, 2))


def test_fingerprints_depend_on_content_not_on_ids():
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
    known = fingerprint(b"/v1/chat/completions", json.dumps(body).encode())
    for same in ({**body, "rid": "x"}, {**body, "user": "u", "bootstrap_room": 5}, dict(reversed(body.items()))):
        assert fingerprint(b"/v1/chat/completions", json.dumps(same).encode()) == known
    for other in ({**body, "temperature": 1}, {**body, "messages": []}, {**body, "min_tokens": 3}):
        assert fingerprint(b"/v1/chat/completions", json.dumps(other).encode()) != known
    assert fingerprint(b"/generate", json.dumps(body).encode()) != known
    assert fingerprint(b"/generate", b"\xff") != fingerprint(b"/generate", b"\xfe")


async def test_an_attempt_that_fails_otherwise_ends_its_quarantine(start_router, chat, pool, worker, script):
    """A slot that stayed taken would make all suspects wait for as long as they may."""
    full = [await worker(script.status(429)) for _ in range(3)]
    workers = [*await pool(1, mortal(takes=10.0)), *full, *await pool(1, mortal(takes=0.05))]
    router = await start_router(*workers, policy="round_robin")
    asked = [ask(chat, router, f"hello {number}") for number in range(10)]
    await script.until(lambda: workers[0].posts)
    await kill(workers[0])
    assert [(await reply).status for reply in asked] == [200] * 10
    assert all(map(router.dispatcher.poison.slots.is_free, router.registry))


async def test_a_refusal_is_not_taken_back_by_who_knows_less(start_router, worker):
    guard = (await start_router(await worker())).dispatcher.poison
    refused = poison_guard.Deaths(b"x", "regular", 3, 0.1, 60.0, refused=True)
    guard.learn(refused)
    for less in (poison_guard.Deaths(b"x", "regular", 1, 0.1, 60.0), poison_guard.Deaths(b"x", "regular", 0, 0.0, 0.0)):
        guard.learn(less)
    (known,) = guard.known()
    assert known.refused and known.seconds > 59
