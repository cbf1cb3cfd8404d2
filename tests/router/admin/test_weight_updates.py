"""Weights of all workers are changed as one, whatever requests run and whichever worker fails."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

_epochs = itertools.count()
PAUSES = ["/pause_generation", "/continue_generation"]
STAGED = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


class Engine:
    """A worker's behaviour: it changes what it reports of its weights as it is told, unless it ``refuses`` a path.
    ``/generate`` is answered with the version that it began with and, a prefill worker's at once, the rest once
    ``released`` is set; a pause that aborts or retracts sets nothing."""

    def __init__(self, **info):
        self.info = {"pair_key": None, "weight_version": "v1", "model_fingerprint": "f1", "epoch": "0",
                     "stream_continuation": True, "tp_size": 2, **info}
        self.paths: list[str] = []
        self.refuses: dict[str, int] = {}
        self.released = asyncio.Event()
        self.released.set()
        self.aborted = asyncio.Event()

    async def __call__(self, served):
        path, body = served.target.decode(), json.loads(served.body or b"{}")
        self.paths.append(path)
        info = served.worker.info
        if status := self.refuses.get(path):
            served.answer(status, b'{"error": {"message": "it is refused"}}')
            return
        if path in ("/update_weights_from_disk", "/end_weight_update"):
            version = body.get("weight_version", info["weight_version"])
            info |= {"weight_version": version, "model_fingerprint": f"of {version}", "epoch": str(next(_epochs) + 1)}
        if path == "/pause_generation":
            info["paused"] = True
            if body["mode"] == "abort":
                self.aborted.set()
        if path == "/continue_generation":
            info["paused"] = False
        if path == "/generate":
            began = info["weight_version"]
            ends = [asyncio.ensure_future(event.wait()) for event in (self.released, self.aborted)]
            await asyncio.wait([*ends, gone := asyncio.ensure_future(served.gone.wait())],
                               return_when=asyncio.FIRST_COMPLETED)
            for each in (*ends, gone):
                each.cancel()
            served.answer(body=json.dumps({"began": began, "ended": info["weight_version"]}).encode())
            return
        served.answer(body=b'{"fits": true, "message": "done"}')

    @property
    def commands(self) -> list[str]:
        return [path for path in self.paths if path not in ("/generate", "/connect_prefill")]


@pytest.fixture
def engines(worker):
    """``await engines(2)``: behaviours and workers."""
    async def start(count, **info):
        made = [Engine(**info) for _ in range(count)]
        return made, [await worker(engine, **engine.info) for engine in made]
    return start


@pytest.fixture
def updates(request_to):
    async def update(router, path="/update_weights_from_disk", **body):
        return await request_to(router, "POST", path, {"model_path": "x", "weight_version": "v2", **body})
    return update


@pytest.fixture
def generates(request_to):
    return lambda router: asyncio.ensure_future(request_to(router, "POST", "/generate", {"text": "a"}))


@pytest.fixture
def busy(start_router, engines, generates, script):
    """``await busy()``: a router, its only worker's behaviour, and a request that runs there until ``released``."""
    async def start(**options):
        (engine,), workers = await engines(1)
        router = await start_router(*workers, **options)
        engine.released.clear()
        running = generates(router)
        await script.until(lambda: engine.paths)
        return router, engine, running
    return start


async def test_running_requests_end_before_an_update_and_new_ones_wait(start_router, engines, updates, generates,
                                                                       script):
    (engine, other), workers = await engines(2)
    router = await start_router(*workers, policy="round_robin")
    for each in (engine, other):
        each.released.clear()
    running = [generates(router) for _ in range(2)]
    await script.until(lambda: engine.paths and other.paths)
    update = asyncio.ensure_future(updates(router))
    await script.until(lambda: router.registry.hold == "wait")
    late = generates(router)
    await script.until(lambda: len(router.dispatcher.hold) == 1)
    assert [engine.commands, other.commands] == [[], []]
    for each in (engine, other):
        each.released.set()
    reply = await update
    assert (reply.status, reply.json["weight_version"], reply.json["success"]) == (200, "v2", True)
    assert [(await each).json for each in running] == [{"began": "v1", "ended": "v1"}] * 2
    assert (await late).json == {"began": "v2", "ended": "v2"}


async def test_requests_that_do_not_end_leave_all_as_it_was(busy, updates):
    router, engine, running = await busy(request_timeout_secs=0.3)
    reply = await updates(router)
    assert (reply.status, engine.commands) == (409, []) and "pause_mode" in reply.error["message"]
    engine.released.set()
    assert (await running).status in (200, 504)


async def test_staged_weights_that_cannot_be_applied_are_dropped(busy, updates):
    router, engine, running = await busy(request_timeout_secs=0.3)
    assert (await updates(router, "/update_weights_from_tensor")).status == 409
    assert engine.commands == [*STAGED[:2], "/discard_weight_update"]
    engine.released.set()
    assert (await running).status in (200, 504)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_workers_are_paused_around_an_update(start_router, engines, updates, mode):
    (p, d), workers = await engines(2)
    router = await start_router(prefill=workers[:1], decode=workers[1:])
    reply = await updates(router, pause_mode=mode)
    assert reply.status == 200 and reply.json["paused_seconds"] < 2
    assert p.commands == d.commands == [PAUSES[0], "/update_weights_from_disk", PAUSES[1]]


async def test_a_caller_s_pause_stays(start_router, engines, updates, request_to):
    (p, d), workers = await engines(2)
    router = await start_router(prefill=workers[:1], decode=workers[1:])
    assert (await request_to(router, "POST", "/pause_generation", {"mode": "retract"})).status == 200
    assert (await updates(router)).status == 200
    assert p.commands == d.commands == [PAUSES[0], "/update_weights_from_disk"]
    assert (await request_to(router, "POST", "/continue_generation")).status == 200


async def test_a_mode_that_is_none(start_router, engines, updates, request_to):
    (engine,), workers = await engines(1)
    router = await start_router(*workers)
    for reply in (await updates(router, pause_mode="later"),
                  await request_to(router, "POST", "/pause_generation", {"mode": "wait"})):
        assert reply.status == 400 and "mode must be" in reply.error["message"]
    assert engine.commands == []


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_prompts_are_computed_anew_with_the_new_weights(start_router, engines, updates, generates, script, mode):
    """The prefill worker has begun: neither its pages nor half of the pair's work are mixed."""
    (p, d), workers = await engines(2)
    router = await start_router(prefill=workers[:1], decode=workers[1:])
    p.released.clear(), d.released.clear()
    running = generates(router)
    await script.until(lambda: "/generate" in p.paths and "/generate" in d.paths)
    update = asyncio.ensure_future(updates(router, pause_mode=mode))
    await script.until(lambda: "/continue_generation" in d.paths)
    p.released.set(), d.released.set()
    assert (await update).status == 200
    assert (await running).json == {"began": "v2", "ended": "v2"}
    assert [each.paths.count("/generate") for each in (p, d)] == [2, 2]


async def test_running_requests_are_aborted(start_router, engines, updates, generates, script):
    (p, d), workers = await engines(2)
    router = await start_router(prefill=workers[:1], decode=workers[1:])
    d.released.clear()
    running = generates(router)
    await script.until(lambda: "/generate" in d.paths)
    assert (await updates(router, abort_all_requests=True)).status == 200
    assert (await running).json == {"began": "v1", "ended": "v1"}
    assert d.commands == p.commands == [PAUSES[0], "/update_weights_from_disk", PAUSES[1]]


async def test_a_worker_that_fails_is_taken_out_until_it_has_the_weights(start_router, engines, updates, request_to,
                                                                         generates, script):
    (engine, other), workers = await engines(2)
    router = await start_router(*workers, policy="round_robin")
    other.refuses["/update_weights_from_disk"] = 500
    reply = await updates(router)
    assert (reply.status, reply.json["success"], reply.json["weight_version"]) == (502, False, "v2")
    (url, why), = reply.json["taken_out"].items()
    assert url == workers[1].url and "it is refused" in why
    await script.until(lambda: all(each.state == "healthy" for each in router.registry))
    assert {(await generates(router)).json["ended"] for _ in range(4)} == {"v2"} and "/generate" not in other.paths
    listed = (await request_to(router, "GET", "/list_workers")).json["workers"]
    assert [why in each.get("outdated", "") for each in listed] == [False, True]
    other.refuses.clear()
    assert (await updates(router)).status == 200
    await script.until(lambda: len(router.registry.available("regular")) == 2)
    assert {(await generates(router)).json["ended"] for _ in range(4)} == {"v2"} and "/generate" in other.paths


async def test_what_all_refuse_changes_nothing(start_router, engines, updates, generates):
    both, workers = await engines(2)
    router = await start_router(*workers)
    for engine in both:
        engine.refuses["/update_weights_from_disk"] = 400
    reply = await updates(router, pause_mode="retract")
    assert (reply.status, reply.json["message"]) == (400, "Nothing was changed.") and "taken_out" not in reply.json
    assert both[0].commands[-1] == both[1].commands[-1] == "/continue_generation"
    assert (await generates(router)).json["ended"] == "v1"


async def test_a_worker_with_other_weights_than_most_is_taken_out(start_router, engines, updates):
    (p, d, odd), workers = await engines(3)
    router = await start_router(prefill=workers[:1], decode=workers[1:])

    async def other(served):
        await Engine.__call__(odd, served)
        served.worker.info["model_fingerprint"] = "of another"

    workers[2].behaviour = other
    reply = await updates(router)
    assert (reply.status, [*reply.json["taken_out"]]) == (502, [workers[2].url])


async def test_weights_are_staged_by_all_before_one_is_changed(start_router, engines, updates):
    (p, d), workers = await engines(2)
    router = await start_router(prefill=workers[:1], decode=workers[1:])
    assert (await updates(router, "/update_weights_from_tensor")).status == 200
    assert p.commands == d.commands == STAGED
    d.refuses[STAGED[1]] = 400
    for engine in (p, d):
        engine.paths.clear()
    reply = await updates(router, "/update_weights_from_tensor", weight_version="v3")
    assert reply.status == 400 and "Nothing was changed" in reply.json["message"]
    assert p.commands == d.commands == [*STAGED[:2], "/discard_weight_update"]
    assert workers[0].info["weight_version"] == workers[1].info["weight_version"] == "v2"


async def test_an_update_of_several_requests_is_the_caller_s(start_router, engines, updates, request_to):
    (p, d), workers = await engines(2)
    router = await start_router(prefill=workers[:1], decode=workers[1:])
    assert (await request_to(router, "POST", STAGED[0])).status == 200
    for mock in workers:
        mock.info["staging_weights"] = True
    for _ in range(2):
        assert (await updates(router, STAGED[1])).status == 200
    end = {"weight_version": "v2", "pause_mode": "in_place"}
    assert (await request_to(router, "POST", STAGED[2], end)).status == 200
    assert p.commands == d.commands == [STAGED[0], STAGED[1], STAGED[1], PAUSES[0], STAGED[2], PAUSES[1]]


async def test_one_update_at_a_time(busy, updates, script):
    router, engine, running = await busy()
    first = asyncio.ensure_future(updates(router))
    await script.until(lambda: router.registry.hold)
    assert (await updates(router)).status == 409
    engine.released.set()
    assert [(await each).status for each in (first, running)] == [200, 200]


async def test_an_update_goes_on_when_its_client_leaves(busy, connect, generates, script):
    router, engine, running = await busy()
    client = await connect(router)
    client.send("POST", "/update_weights_from_disk", b'{"weight_version": "v2"}')
    await script.until(lambda: router.registry.hold)
    late = generates(router)
    client.leave()
    engine.released.set()
    assert (await late).json["began"] == "v2" and (await running).json["ended"] == "v1"


async def test_a_waiting_client_may_leave(busy, updates, connect, script):
    router, engine, running = await busy()
    update = asyncio.ensure_future(updates(router))
    await script.until(lambda: router.registry.hold)
    client = await connect(router)
    client.send("POST", "/generate", b'{"text": "b"}')
    await script.until(lambda: len(router.dispatcher.hold) == 1)
    client.leave()
    await script.until(lambda: not len(router.dispatcher.hold))
    engine.released.set()
    assert [(await each).status for each in (update, running)] == [200, 200]
    assert engine.paths.count("/generate") == 1


async def test_a_worker_that_joins_with_other_weights_gets_no_requests(start_router, engines, updates, request_to,
                                                                       generates, script):
    _, workers = await engines(1)
    router = await start_router(*workers)
    assert (await updates(router)).status == 200
    (late,), (newcomer,) = await engines(1)
    assert (await request_to(router, "POST", "/add_worker", {"url": newcomer.url})).status == 200
    await script.until(lambda: router.registry.get(newcomer.url).outdated)
    assert "weight version v1" in router.registry.get(newcomer.url).outdated
    newcomer.info |= {"weight_version": "v2", "model_fingerprint": "of v2", "epoch": "later"}  # by its administrator
    await script.until(lambda: len(router.registry.available("regular")) == 2)
    await request_to(router, "POST", f"/remove_worker?url={workers[0].url}")
    newcomer.info |= {"weight_version": "v3", "model_fingerprint": "of v3", "epoch": "last"}  # nobody is left with v2
    await script.until(lambda: router.registry.get(newcomer.url).weight_version == "v3")
    assert (await generates(router)).json["began"] == "v3" and late.paths.count("/generate") == 1


async def test_versions_that_differ_make_no_pair(start_router, engines, script):
    _, (p,) = await engines(1, pair_key="a")
    _, (d,) = await engines(1, pair_key="a", weight_version="v2")
    router = await start_router(prefill=[p], decode=[d])
    await script.until(lambda: router.registry.get(p.url).misfits)
    assert router.registry.get(p.url).misfits[0].why == (
        "the weight version is v2 here and v1 there (decode, prefill)")
    p.info |= {"weight_version": "v2", "epoch": "1"}
    await script.until(lambda: router.registry.ready(pairs=True))


# ---------------------------------------------------------------------- groups


async def test_ranks_of_all_workers_join_a_trainer_s_group(start_router, engines, request_to):
    both, workers = await engines(2)
    workers[1].info |= {"tp_size": 4, "pp_size": 2}
    router = await start_router(prefill=workers[:1], decode=workers[1:])
    group = {"master_address": "t", "master_port": 1, "rank_offset": 1, "world_size": 11, "group_name": "g"}
    reply = await request_to(router, "POST", "/init_weights_update_group", group)
    assert (reply.status, reply.json["rank_offsets"]) == (200, {workers[0].url: 1, workers[1].url: 3})
    assert [each.posts[-1].json for each in workers] == [group, {**group, "rank_offset": 3}]
    wrong = await request_to(router, "POST", "/init_weights_update_group", {**group, "world_size": 12})
    assert (wrong.status, wrong.error["param"]) == (400, "world_size")
    assert "must be 11: 1 of the trainer, and 2 + 8 ranks" in wrong.error["message"]
    both[1].refuses["/init_weights_update_group"] = 400
    reply = await request_to(router, "POST", "/init_weights_update_group", group)
    assert (reply.status, workers[0].posts[-1].target, workers[0].posts[-1].json) == (
        400, b"/destroy_weights_update_group", {"group_name": "g"})
