"""Pairs: both calls of a request, and the effect of one's failure on the other."""

from __future__ import annotations

import asyncio
import json

import pytest


def fields(body: bytes) -> dict:
    return {key: value for key, value in json.loads(body).items() if key.startswith("bootstrap_")}


async def test_both_workers_get_the_same_body_and_the_client_decode_s_response(start_router, worker, script, connect):
    p = await worker(disaggregation_mode="prefill", disaggregation_bootstrap_port=9123)
    d = await worker(script.stream("one", "two", "[DONE]"), disaggregation_mode="decode")
    client = await connect(await start_router(prefill=[p], decode=[d]))
    body = b'{"messages": [],  "t": 1.50, "unknown": {"a" : 1}}'
    client.send("POST", "/v1/chat/completions", body)
    reply = await client.reply()
    assert reply.body == b"data: one\n\ndata: two\n\ndata: [DONE]\n\n"
    assert p.bodies == d.bodies
    assert p.bodies[0].endswith(b"," + body[1:])
    sent = fields(p.bodies[0])
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 9123)
    assert 0 <= sent["bootstrap_room"] < 2**63


@pytest.mark.parametrize(("given", "expected"), [("none", None), ("9777", 9777)])
async def test_bootstrap_port_can_be_given(start_router, worker, chat, script, given, expected):
    p, d = await worker(disaggregation_bootstrap_port=1), await worker()
    router = await start_router(wait=True, pd_disaggregation=True)
    for mock, role in ((p, "prefill"), (d, "decode")):
        router.add_worker(_worker(mock.url, role, given))
    await script.until(lambda: router.registry.ready(pairs=True))
    assert (await chat(router)).status == 200
    assert fields(p.bodies[0])["bootstrap_port"] == expected


def _worker(url, role, port):
    from baton.router.config.endpoint import Endpoint
    from baton.router.config.workers import parse_bootstrap_port
    from baton.router.workers.registry import Worker

    return Worker(Endpoint.parse(url), role, bootstrap_port=parse_bootstrap_port(port))


@pytest.mark.parametrize(("path", "body", "size"), [
    ("/generate", {"text": ["a", "b", "c"]}, 3),
    ("/generate", {"input_ids": [[1, 2], [3]]}, 2),
    ("/v1/completions", {"prompt": ["a", "b"]}, 2),
    ("/generate", {"input_ids": [1, 2, 3]}, None),
    ("/v1/completions", {"prompt": "a", "n": 4}, None),
])
async def test_batches_get_a_room_a_prompt(start_router, worker, request_to, path, body, size):
    p, d = await worker(), await worker()
    assert (await request_to(await start_router(prefill=[p], decode=[d]), "POST", path, body)).status == 200
    sent = fields(d.bodies[0])
    if size is None:
        assert isinstance(sent["bootstrap_room"], int)
    else:
        assert [len(value) for value in sent.values()] == [size] * 3
        assert len(set(sent["bootstrap_room"])) == size


@pytest.mark.parametrize("body", [b"[1]", b"", b"{", b'"text"'])
async def test_body_that_is_no_object_is_refused_by_the_router(start_router, worker, request_to, body):
    p, d = await worker(), await worker()
    reply = await request_to(await start_router(prefill=[p], decode=[d]), "POST", "/v1/chat/completions", body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert not p.posts
    assert not d.posts


async def test_client_that_leaves_cancels_both(start_router, worker, script, connect):
    p, d = await worker(script.silence), await worker(script.silence)
    client = await connect(await start_router(prefill=[p], decode=[d]))
    client.send("POST", "/generate", b'{"text": "a"}')
    await script.until(lambda: p.posts and d.posts)
    client.leave()
    await script.until(lambda: (p.left, d.left) == (1, 1), 1.0)


async def test_failed_prefill_is_retried_on_another_with_a_new_room(start_router, worker, script, chat):
    bad, good = await worker(script.status(500)), await worker()

    async def wait_for_cache(served):
        if served.json["bootstrap_room"] in {fields(body)["bootstrap_room"] for body in good.bodies}:
            served.answer()
        else:
            await script.silence(served)

    d = await worker(wait_for_cache)

    async def prefill(served):
        await asyncio.sleep(0.01)
        served.answer()

    good.behaviour = prefill
    router = await start_router(prefill=[bad, good], decode=[d], policy="round_robin")
    assert [(await chat(router)).status for _ in range(2)] == [200, 200]
    assert len(bad.posts) == 1
    rooms = [fields(body)["bootstrap_room"] for body in d.bodies]
    assert len(rooms) == len(set(rooms)) == 3
    assert d.left == 1  # the call whose prefill failed was cancelled


@pytest.mark.parametrize("reports", ["prefill", "decode"])
async def test_the_half_that_failed_is_left_whichever_reports_it_first(start_router, worker, script, chat, reports):
    """Decode answers with prefill's error, and says that it is prefill's: its logits were not finite, say."""
    peer = b"x-baton-failed: peer\r\n"
    bad = await worker(script.status(500) if reports == "prefill" else script.silence)
    good = await worker()

    def has_room(prefill, room):
        return room in [fields(body)["bootstrap_room"] for body in prefill.bodies]

    async def decode(served):
        room = served.json["bootstrap_room"]
        await script.until(lambda: has_room(good, room) or has_room(bad, room))
        if has_room(good, room):
            served.answer()
        elif reports == "decode":
            served.answer(500, extra=peer)
        else:
            await script.silence(served)

    d = await worker(decode)
    router = await start_router(prefill=[bad, good], decode=[d], policy="round_robin", cb_failure_threshold=2,
                                cb_timeout_duration_secs=60)
    for _ in range(6):
        assert (await chat(router)).status == 200
    assert len(bad.posts) == 2
    assert {worker.url: worker.circuit.state for worker in router.registry} == {
        bad.url: "open", good.url: "closed", d.url: "closed"}
    assert router.metrics.retries == {"prefill_status_500": 2}


async def test_prefill_s_refusal_reaches_the_client_while_decode_waits(start_router, worker, script, chat):
    p, d = await worker(script.status(400)), await worker(script.silence)
    reply = await chat(await start_router(prefill=[p], decode=[d]))
    assert (reply.status, reply.error["message"]) == (400, "scripted 400")
    await script.until(lambda: d.left == 1)
    assert len(p.posts) == 1


async def test_decode_s_refusal_cancels_prefill(start_router, worker, script, chat):
    p, d = await worker(script.silence), await worker(script.status(400))
    reply = await chat(await start_router(prefill=[p], decode=[d]))
    assert (reply.status, reply.error["message"]) == (400, "scripted 400")
    await script.until(lambda: p.left == 1)


@pytest.mark.parametrize("failure", ["die", "status_502"])
async def test_failed_decode_is_retried_on_another(start_router, worker, script, chat, failure):
    p = await worker()
    bad = await worker(script.die if failure == "die" else script.status(502))
    good = await worker(script.stream("one"))
    router = await start_router(prefill=[p], decode=[bad, good], policy="round_robin")
    assert [(await chat(router)).status for _ in range(4)] == [200] * 4
    assert len(good.posts) == 4
    for bodies, least in ((p.bodies, 5), (bad.bodies, 1)):  # no call is sent twice, not even on a stale connection
        rooms = [fields(body)["bootstrap_room"] for body in bodies]
        assert len(set(rooms)) == len(rooms) >= least


async def test_another_decode_takes_over_from_the_same_prefill_which_gets_the_previous_room(
        start_router, worker, script, chat):
    async def die_once(served):
        await (script.die if sum(len(d.posts) for d in decodes) == 1 else script.answer)(served)

    prefills = [await worker(stream_continuation=True) for _ in range(2)]
    decodes = [await worker(die_once) for _ in range(2)]
    router = await start_router(prefill=prefills, decode=decodes, policy="round_robin")
    assert (await chat(router)).status == 200
    (used,) = [p for p in prefills if p.posts]
    first, second = [fields(body) for body in used.bodies]
    assert second.pop("bootstrap_previous_room") == first["bootstrap_room"] != second["bootstrap_room"]
    assert [len(d.posts) for d in decodes] == [1, 1]
    assert second in [fields(d.bodies[0]) for d in decodes]  # decode need not know


async def test_a_batch_names_all_previous_rooms(start_router, worker, script, request_to):
    async def fail_once(served):
        served.answer(500 if sum(len(d.posts) for d in decodes) == 1 else 200)

    p, decodes = await worker(stream_continuation=True), [await worker(fail_once) for _ in range(2)]
    router = await start_router(prefill=[p], decode=decodes, policy="round_robin")
    assert (await request_to(router, "POST", "/generate", {"text": ["a", "b"]})).status == 200
    first, second = [fields(body) for body in p.bodies]
    assert second["bootstrap_previous_room"] == first["bootstrap_room"] and len(first["bootstrap_room"]) == 2


async def test_a_transfer_that_prefill_reports_failed_goes_to_another_decode(start_router, worker, script, chat):
    async def fail_once(served):
        served.answer(502 if sum(len(p.posts) for p in prefills) == 1 else 200)

    prefills = [await worker(fail_once) for _ in range(2)]

    async def wait_for_cache(served):
        await script.until(lambda: sum(len(p.posts) for p in prefills) == 2)
        served.answer()

    decodes = [await worker(wait_for_cache) for _ in range(2)]
    router = await start_router(prefill=prefills, decode=decodes, policy="round_robin")
    assert (await chat(router)).status == 200
    assert sorted(len(p.posts) for p in prefills) == [0, 2] and [len(d.posts) for d in decodes] == [1, 1]


async def test_failed_transfer_is_tried_again_on_the_same_pair(start_router, worker, script, chat):
    async def fail_once(served):
        served.answer(502 if len(d.posts) == 1 else 200)

    p, d = await worker(script.silence), await worker(fail_once)
    router = await start_router(prefill=[p], decode=[d])
    assert (await chat(router)).status == 200
    assert len({fields(body)["bootstrap_room"] for body in d.bodies}) == 2
    assert router.metrics.retries == {"decode_status_502": 1}


async def test_dead_prefill_worker(start_router, worker, script, chat):
    """Prefill's process is gone: decode's call must not be left waiting, and the client gets a response soon."""
    p, d = await worker(), await worker(script.silence)
    router = await start_router(prefill=[p], decode=[d], health_check_interval_secs=60)
    await p.stop()
    begun = asyncio.get_running_loop().time()
    reply = await chat(router)
    assert (reply.status, reply.error["code"]) == (503, "worker_unavailable")
    assert asyncio.get_running_loop().time() - begun < 1.0
    await script.until(lambda: d.left == len(d.posts))


async def test_decode_that_breaks_mid_stream_ends_with_an_error_event(start_router, worker, script, chat):
    async def break_off(served):
        served.head()
        served.event("one")
        await asyncio.sleep(0.02)
        served.die()

    p, d = await worker(script.silence), await worker(break_off)
    reply = await chat(await start_router(prefill=[p], decode=[d]), stream=True)
    assert b'"error"' in reply.body
    await script.until(lambda: p.left == 1)


async def test_slow_prefill_answer_neither_delays_nor_leaks(start_router, worker, script, chat):
    """Decode may be done before prefill's own response ends; its load counts until then, the client need not wait."""
    async def late(served):
        await asyncio.sleep(0.2)
        served.answer()

    p, d = await worker(late), await worker()
    router = await start_router(prefill=[p], decode=[d])
    assert (await chat(router)).status == 200
    assert [w.load for w in router.registry] == [1, 0]
    await script.until(lambda: not any(w.load for w in router.registry))
    assert p.left == 0


async def test_each_role_has_its_policy(start_router, worker, chat):
    prefills, decodes = [await worker() for _ in range(2)], [await worker() for _ in range(2)]
    router = await start_router(prefill=prefills, decode=decodes, policy="cache_aware", decode_policy="round_robin")
    for _ in range(6):
        await chat(router, messages=[{"role": "user", "content": "same " * 200}])
    assert sorted(len(mock.posts) for mock in prefills) == [0, 6]
    assert [len(mock.posts) for mock in decodes] == [3, 3]


async def test_other_endpoints_go_to_decode(start_router, worker, request_to):
    p, d = await worker(), await worker()
    router = await start_router(prefill=[p], decode=[d])
    assert (await request_to(router, "POST", "/v1/embeddings", {"input": "a"})).status == 200
    assert fields(d.bodies[0]) == {}
    assert not p.posts
    assert (await request_to(router, "GET", "/v1/models")).json["data"][0]["id"] == "tiny"
