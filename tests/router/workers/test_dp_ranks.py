"""--dp-aware: requests are placed on the data-parallel ranks of a server."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.router.workers.dp_ranks import count_of, server_url, with_prefill_rank, with_rank

CHAT = b"/v1/chat/completions"


@pytest.fixture
def ranked(worker):
    """``await ranked(size, behaviour, **info)``: a worker that reports ``size`` ranks."""

    async def start(size, *behaviour, **info):
        return await worker(*behaviour, dp_size=size, **info)

    return start


@pytest.mark.parametrize(("body", "expected"), [
    (b'{"a": 1.50}', b'{"data_parallel_rank":3,"a": 1.50}'),
    (b" { }\n", b' {"data_parallel_rank":3 }\n'),
    (b'{"text": "say \\"data_parallel_rank\\""}', b'{"data_parallel_rank":3,"text": "say \\"data_parallel_rank\\""}'),
    (b'{"x": {"routed_dp_rank": 1}}', b'{"data_parallel_rank":3,"x": {"routed_dp_rank": 1}}'),
    (b'{"a": 1.50, "routed_dp_rank": 1, "data_parallel_rank": null, "z": 1e2}',
     b'{"data_parallel_rank":3,"a":1.50,"z":1e2}'),
    (b"[1]", b"[1]"), (b"", b""), (b"--boundary\r\n", b"--boundary\r\n"),
    (b'{"routed_dp_rank": ', b'{"routed_dp_rank": '),
])
def test_a_rank_is_added_to_the_body(body, expected):
    assert with_rank(CHAT, body, 3) == expected
    assert with_rank(b"/tokenize", body, 3) == body


def test_a_decode_server_gets_both_ranks():
    body = with_rank(CHAT, with_prefill_rank(b'{"disagg_prefill_dp_rank": 7, "a": 1.50}', 0), 1)
    assert json.loads(body) == {"data_parallel_rank": 1, "disagg_prefill_dp_rank": 0, "a": 1.5}
    assert body.count(b"disagg_prefill_dp_rank") == 1
    assert b"1.50" in body


def test_names_of_ranks_and_their_number():
    assert [server_url(url) for url in ("http://h:1", "http://h:1@0", "http://h:1@12/")] == ["http://h:1"] * 3
    assert [count_of(info) for info in ({}, {"dp_size": 1}, {"dp_size": "x"}, {"dp_size": 4})] == [1, 1, 1, 4]


async def test_requests_are_placed_on_ranks(start_router, ranked, chat):
    one, two = await ranked(2), await ranked(1)
    router = await start_router(one, two, dp_aware=True, policy="round_robin")
    assert sorted(w.url for w in router.registry) == sorted([f"{one.url}@0", f"{one.url}@1", two.url])
    for _ in range(6):
        assert (await chat(router)).status == 200
    assert sorted(served.json["data_parallel_rank"] for served in one.posts) == [0, 0, 1, 1]
    assert [served.json.get("data_parallel_rank") for served in two.posts] == [None, None]
    assert one.bodies[0].endswith(b',"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}')


async def test_without_the_flag_a_server_is_one_worker(start_router, ranked, chat):
    mock = await ranked(4)
    router = await start_router(mock)
    assert (await chat(router)).status == 200
    assert [w.url for w in router.registry] == [mock.url]
    assert "data_parallel_rank" not in mock.posts[0].json


async def test_caches_are_those_of_ranks(start_router, ranked, chat):
    """cache_aware keeps a conversation on its rank, and spreads conversations over the ranks."""
    mock = await ranked(4)
    router = await start_router(mock, dp_aware=True, policy="cache_aware")
    homes = {}
    for turn in range(3):
        for talk in range(8):
            text = f"{talk} said " * (100 + 10 * turn)
            await chat(router, messages=[{"role": "user", "content": text}])
            rank = mock.posts[-1].json["data_parallel_rank"]
            assert homes.setdefault(talk, rank) == rank
    assert sorted(homes.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_load_is_that_of_ranks(start_router, ranked, script, connect):
    mock = await ranked(3, script.silence)
    router = await start_router(mock, dp_aware=True, policy="least_loaded")
    clients = [await connect(router) for _ in range(6)]
    for client in clients:
        client.send("POST", "/generate", b'{"text": "a"}')
    await script.until(lambda: len(mock.posts) == 6)
    assert sorted(w.load for w in router.registry) == [2, 2, 2]
    for client in clients:
        client.leave()


async def test_pairs_place_both_calls_on_ranks(start_router, ranked, chat, script):
    p = await ranked(2, disaggregation_mode="prefill", disaggregation_bootstrap_port=9001)
    d = await ranked(4, disaggregation_mode="decode")
    router = await start_router(prefill=[p], decode=[d], dp_aware=True, policy="round_robin")
    for _ in range(8):
        assert (await chat(router)).status == 200
    by_room = {served.json["bootstrap_room"]: served.json["data_parallel_rank"] for served in p.posts}
    assert sorted(by_room.values()) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sorted(served.json["data_parallel_rank"] for served in d.posts) == [0, 0, 1, 1, 2, 2, 3, 3]
    for served in d.posts:
        assert served.json["disagg_prefill_dp_rank"] == by_room[served.json["bootstrap_room"]]
        assert served.json["bootstrap_port"] == 9001
    assert not any("disagg_prefill_dp_rank" in served.json for served in p.posts)


async def test_a_retry_goes_to_another_rank(start_router, ranked, script, chat):
    async def rank_0_fails(served):
        await (script.status(500) if served.json["data_parallel_rank"] == 0 else script.answer)(served)

    mock = await ranked(2, rank_0_fails)
    router = await start_router(mock, dp_aware=True, policy="round_robin")
    assert [(await chat(router)).status for _ in range(4)] == [200] * 4
    assert {served.json["data_parallel_rank"] for served in mock.posts} == {0, 1}


async def test_membership_by_plain_url_acts_on_all_ranks(start_router, ranked, request_to, chat, script):
    mock = await ranked(3)
    router = await start_router(dp_aware=True, wait=False)
    assert (await request_to(router, "POST", f"/add_worker?url={mock.url}")).status == 200
    await script.until(lambda: len(router.registry.available("regular")) == 3)
    assert (await request_to(router, "POST", f"/add_worker?url={mock.url}")).status == 409
    listed = (await request_to(router, "GET", "/list_workers")).json
    assert sorted(listed["urls"]) == [f"{mock.url}@{rank}" for rank in range(3)]
    assert sorted(shown["dp_rank"] for shown in listed["workers"]) == [0, 1, 2]
    assert (await request_to(router, "POST", f"/remove_worker?url={mock.url}")).status == 200
    assert len(router.registry) == 0
    assert (await request_to(router, "POST", "/workers", {"url": mock.url})).status == 202
    await script.until(lambda: len(router.registry.available("regular")) == 3)
    one = listed["urls"][1]
    assert (await request_to(router, "POST", f"/drain_worker?url={one}")).json["running"] == 0
    assert len(router.registry) == 0


async def test_a_drain_waits_for_each_rank(start_router, ranked, script, connect, request_to):
    gate = asyncio.Event()

    async def wait(served):
        await gate.wait()
        served.answer()

    mock = await ranked(2, wait)
    router = await start_router(mock, dp_aware=True)
    client = await connect(router)
    client.send("POST", "/generate", b'{"text": "a"}')
    await script.until(lambda: mock.posts)
    assert (await request_to(router, "POST", f"/drain_worker?url={mock.url}")).json["running"] == 1
    assert [w.load for w in router.registry] == [1]
    gate.set()
    assert (await client.reply()).status == 200
    await script.until(lambda: not len(router.registry))


async def test_a_server_is_asked_once_not_each_of_its_ranks(start_router, ranked, request_to):
    async def reply(served):
        served.answer(body=b'[{"dp_rank": 0, "num_reqs": 5}, {"dp_rank": 1, "num_reqs": 6}]')

    mock = await ranked(2, reply)
    router = await start_router(mock, dp_aware=True)
    response = await request_to(router, "POST", "/flush_cache")
    assert (response.json["workers"], len(mock.posts)) == ({mock.url: 200}, 1)
    loads = (await request_to(router, "GET", "/get_load")).json["workers"]
    assert len(mock.posts) == 2
    assert {shown["worker"]: shown["report"] for shown in loads} == {
        f"{mock.url}@{rank}": [{"dp_rank": rank, "num_reqs": 5 + rank}] for rank in range(2)}


@pytest.mark.parametrize("after", [1, 4])
async def test_a_server_that_comes_back_with_other_ranks(start_router, ranked, script, chat, after):
    mock = await ranked(2)
    router = await start_router(mock, dp_aware=True)
    await mock.stop()
    await script.until(lambda: not router.registry.available("regular"))
    mock.info["dp_size"] = after
    await mock.start()
    await script.until(lambda: len(router.registry.available("regular")) == after == len(router.registry))
    assert (await chat(router)).status == 200


async def test_a_refused_connection_takes_all_ranks_out(start_router, ranked, worker, chat):
    dead, good = await ranked(4), await worker()
    router = await start_router(dead, good, dp_aware=True, policy="round_robin", health_check_interval_secs=60)
    await dead.stop()
    assert [(await chat(router)).status for _ in range(5)] == [200] * 5
    assert sum(router.metrics.retries.values()) <= 1
    assert [w.url for w in router.registry.available("regular")] == [good.url]


@pytest.mark.parametrize(("rank", "ports"), [(None, (5557, 5600)), (0, (5557, 5600)), (3, (5560, 5603))])
def test_each_rank_publishes_its_cache_on_its_own_port(rank, ports):
    """As SGLang's servers do: from the configured port on."""
    pytest.importorskip("zmq")
    from baton.router.config.endpoint import Endpoint
    from baton.router.monitoring.kv_event_watch import source_of
    from baton.router.workers.registry import Worker

    info = {"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5600"}'}
    source = source_of(Worker(Endpoint.parse("http://h:1"), rank=rank), info)
    assert (source.events, source.replay) == tuple(f"tcp://h:{port}" for port in ports)
