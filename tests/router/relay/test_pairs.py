"""Pairs are tried before requests need them: misfits get none, are logged once, and are tried again."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging

import pytest

from baton.router.config.endpoint import Endpoint
from baton.router.monitoring import pair_trials
from baton.router.workers import compatibility
from baton.router.workers.compatibility import Pairs
from baton.router.workers.registry import Worker

_names = itertools.count()
WHY = "prefill and decode do not fit together: page_size"


class Fleet:
    """Mock servers that report their kind. ``fits(prefill's kind, decode's kind)`` is the result of a handshake."""

    def __init__(self, worker, fits=lambda prefill, decode: prefill == decode):
        self._worker = worker
        self.fits = fits
        self.by_port: dict[int, object] = {}
        self.trials: list[tuple[object, object]] = []
        self.most = 0
        self._now: list[object] = []
        self.seconds = 0.0
        self.refuses = False

    async def prefill(self, kind="a", **info):
        port = 20_000 + next(_names)
        made = await self._worker(self.answer, disaggregation_mode="prefill", disaggregation_bootstrap_port=port,
                                  **self.info_of(kind), **info)
        self.by_port[port] = made
        return made

    async def decode(self, kind="a", **info):
        return await self._worker(self.answer, disaggregation_mode="decode", **self.info_of(kind), **info)

    def info_of(self, kind):
        return {"pair_key": kind, "epoch": f"epoch-{next(_names)}", "stream_continuation": True}

    def become(self, mock, kind, **info):
        mock.info.update(self.info_of(kind), **info)

    async def answer(self, served):
        decode = served.worker
        if served.target != b"/connect_prefill":
            if self.refuses and not self.fits_now(served):
                served.answer(502, b"{}", extra=b"X-Error-Code: pair_mismatch\r\n")
            else:
                served.answer()
            return
        decode.posts.pop()
        prefill = self.by_port[served.json["bootstrap_port"]]
        assert prefill not in self._now and decode not in self._now, "a worker is in two trials at once"
        self._now += [prefill, decode]
        self.most = max(self.most, len(self._now) // 2)
        self.trials.append((prefill, decode))
        await asyncio.sleep(self.seconds)
        self._now.remove(prefill)
        self._now.remove(decode)
        fits = self.fits(prefill.info["pair_key"], decode.info["pair_key"])
        served.answer(body=json.dumps({"fits": fits, "message": None if fits else WHY}).encode())

    def fits_now(self, served):
        mode = served.worker.info["disaggregation_mode"]
        if mode == "prefill":
            return True
        prefill = self.by_port[served.json["bootstrap_port"]]
        return self.fits(prefill.info["pair_key"], served.worker.info["pair_key"])


@pytest.fixture
def fleet(worker):
    return Fleet(worker)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "baton.router")
    return lambda: [record.getMessage() for record in caplog.records if "get no requests together" in record.message]


async def served_by(router, chat, mocks, count=12):
    """The number of requests that each mock got of ``count`` with different prompts."""
    before = [len(mock.posts) for mock in mocks]
    for i in range(count):
        text = f"{i} " * 400
        reply = await chat(router, messages=[{"role": "user", "content": text}])
        assert reply.status == 200, reply.body
    return [len(mock.posts) - seen for mock, seen in zip(mocks, before)]


async def ready(router, script):
    await script.until(lambda: router.registry.ready(pairs=True))


async def test_all_pairs_are_tried_before_the_first_request(start_router, fleet, script):
    prefills, decodes = [await fleet.prefill() for _ in range(2)], [await fleet.decode() for _ in range(2)]
    made = await start_router(prefill=prefills, decode=decodes)
    await script.until(lambda: len(fleet.trials) == 4)
    await ready(made, script)
    assert {(p, d) for p in prefills for d in decodes} == set(fleet.trials)
    assert made.registry.pairs().all_fit


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded", "power_of_two", "cache_aware",
                                    "cache_exact", "consistent_hash"])
async def test_what_does_not_fit_is_never_chosen(start_router, fleet, chat, script, policy):
    p, d, other = await fleet.prefill("a"), await fleet.decode("a"), await fleet.decode("b")
    lonely = await fleet.prefill("c")
    made = await start_router(prefill=[p, lonely], decode=[d, other], policy=policy)
    await ready(made, script)
    assert await served_by(made, chat, [p, d, other, lonely]) == [12, 12, 0, 0]


async def test_two_kinds_serve_side_by_side(start_router, fleet, chat, script):
    """As in the middle of a rolling update."""
    old, new = (await fleet.prefill("old"), await fleet.decode("old")), (await fleet.prefill("new"),
                                                                         await fleet.decode("new"))
    made = await start_router(prefill=[old[0], new[0]], decode=[old[1], new[1]], policy="round_robin")
    await script.until(lambda: made.registry.pairs().count == 2)
    assert await served_by(made, chat, [*old, *new]) == [6, 6, 6, 6]
    for p, d in (old, new):
        ports = [json.loads(body)["bootstrap_port"] for body in d.bodies]
        assert ports == [p.info["disaggregation_bootstrap_port"]] * 6


async def test_a_misfit_is_logged_once_and_shown(start_router, fleet, chat, script, request_to, warnings):
    p, d, other = await fleet.prefill("a"), await fleet.decode("a"), await fleet.decode("b")
    made = await start_router(prefill=[p], decode=[d, other])
    await script.until(lambda: len(fleet.trials) == 2)
    await ready(made, script)
    await served_by(made, chat, [p])
    (warning,) = warnings()
    assert p.url in warning and other.url in warning and WHY in warning
    listed = {shown["url"]: shown for shown in (await request_to(made, "GET", "/list_workers")).json["workers"]}
    assert listed[p.url]["misfits"] == [{"worker": other.url, "why": WHY}]
    assert listed[other.url]["misfits"] == [{"worker": p.url, "why": WHY}]
    assert listed[d.url]["misfits"] == []
    shown = (await request_to(made, "GET", "/dashboard/data")).json["workers"]
    assert [worker["misfits"] for worker in shown] == [listed[worker["url"]]["misfits"] for worker in shown]
    metrics = (await request_to(made, "GET", "/metrics")).body.decode()
    assert "baton_router_pairs 1.0" in metrics
    assert f'baton_router_worker_incompatible_peers{{role="decode",worker="{other.url}"}} 1.0' in metrics


async def test_not_ready_where_no_pair_fits_and_decode_serves_alone(start_router, fleet, chat, script, request_to):
    p, d = await fleet.prefill("a"), await fleet.decode("b")
    made = await start_router(prefill=[p], decode=[d])
    await script.until(lambda: any(worker.misfits for worker in made.registry))
    reply = await request_to(made, "GET", "/readiness")
    assert reply.status == 503
    assert reply.json["misfits"] == [{"prefill": p.url, "decode": d.url, "why": WHY}]
    assert await served_by(made, chat, [p, d], 3) == [0, 3]
    assert all(b"bootstrap" not in body for body in d.bodies)


async def test_without_own_servers_the_client_hears_of_it_at_once(start_router, fleet, chat, script):
    p, d = await fleet.prefill("a"), await fleet.decode("b")
    p.info["stream_continuation"] = d.info["stream_continuation"] = False
    made = await start_router(prefill=[p], decode=[d])
    await script.until(lambda: any(worker.misfits for worker in made.registry))
    reply = await chat(made)
    assert reply.status == 503 and "fits" in reply.error["message"] and not p.posts and not d.posts


async def test_a_worker_that_comes_back_as_another_is_tried_again(start_router, fleet, chat, script, warnings):
    """Within a second or so, whatever the interval of checks."""
    p, d = await fleet.prefill("a"), await fleet.decode("b")
    made = await start_router(prefill=[p], decode=[d], health_check_interval_secs=60.0)
    await script.until(warnings)
    fleet.become(d, "a")
    await ready(made, script)
    assert await served_by(made, chat, [p, d], 3) == [3, 3]


async def test_a_worker_that_joins_later_is_tried(start_router, fleet, chat, script, request_to):
    p, d = await fleet.prefill("a"), await fleet.decode("b")
    made = await start_router(prefill=[p], decode=[d])
    await script.until(lambda: any(worker.misfits for worker in made.registry))
    later = await fleet.decode("a")
    await request_to(made, "POST", "/add_worker", {"url": later.url, "role": "decode"})
    await ready(made, script)
    await request_to(made, "POST", "/remove_worker", {"url": d.url})
    assert made.registry.pairs().all_fit and not any(worker.misfits for worker in made.registry)
    assert await served_by(made, chat, [p, later], 3) == [3, 3]


async def test_replaced_weights_separate_a_pair_until_both_have_them(start_router, fleet, chat, script):
    """Fingerprints that differ need no trial: no pair is formed even while a trial runs."""
    p, d = await fleet.prefill("a", model_fingerprint="old"), await fleet.decode("a", model_fingerprint="old")
    made = await start_router(prefill=[p], decode=[d])
    await ready(made, script)
    fleet.become(p, "a2", model_fingerprint="new")
    fleet.fits = lambda prefill, decode: True  # as of a handshake that does not know of fingerprints
    await script.until(lambda: not made.registry.ready(pairs=True))
    (prefill,) = made.registry.available("prefill")
    assert "fingerprint" in prefill.misfits[0].why
    assert await served_by(made, chat, [p, d], 3) == [0, 3]
    fleet.become(d, "a2", model_fingerprint="new")
    await ready(made, script)
    assert await served_by(made, chat, [p, d], 3) == [3, 3]


@pytest.mark.parametrize("checks", [{"health_check_interval_secs": 60.0}, {"disable_health_check": True}])
async def test_a_refusal_that_a_request_meets_is_looked_into_at_once(start_router, fleet, chat, script, checks):
    """The router's next health check is a minute away, or never comes."""
    p, d = await fleet.prefill("a"), await fleet.decode("a")
    spare = await fleet.decode("a")
    made = await start_router(prefill=[p], decode=[d, spare], policy="round_robin", **checks)
    await script.until(lambda: len(fleet.trials) == 2)
    await ready(made, script)
    fleet.refuses = True
    fleet.become(d, "b")
    assert await served_by(made, chat, [spare], 4) == [4]
    await script.until(lambda: made.registry.pairs().count == 1)
    assert await served_by(made, chat, [spare, d], 4) == [4, 0]


async def test_very_many_pairs_are_tried_a_few_at_a_time(start_router, fleet, script):
    fleet.seconds = 0.002
    prefills, decodes = [await fleet.prefill() for _ in range(20)], [await fleet.decode() for _ in range(20)]
    made = await start_router(prefill=prefills, decode=decodes, health_check_interval_secs=60.0)
    await ready(made, script)
    assert len(fleet.trials) < 100, "requests are served long before all are connected"
    await script.until(lambda: len(fleet.trials) == 400)
    assert len(set(fleet.trials)) == 400
    assert 1 < fleet.most <= pair_trials.MAX_CONCURRENT_TRIALS


async def test_servers_that_cannot_be_asked_are_used(start_router, worker, fleet, chat, script):
    p = await fleet.prefill("a")
    d = await worker(script.status(404), disaggregation_mode="decode", **fleet.info_of("a"))
    made = await start_router(prefill=[p], decode=[d])
    await ready(made, script)
    d.behaviour = script.answer
    assert await served_by(made, chat, [p, d], 3) == [3, 3]


async def test_a_pair_that_could_not_be_tried_is_used_and_tried_again(
        start_router, worker, fleet, chat, script, monkeypatch):
    monkeypatch.setattr(pair_trials, "_RETRY_SECONDS", 0.05)
    p = await fleet.prefill("a")
    d = await worker(script.die, disaggregation_mode="decode", **fleet.info_of("a"))
    made = await start_router(prefill=[p], decode=[d])
    await ready(made, script)
    d.behaviour = fleet.answer
    fleet.fits = lambda prefill, decode: False
    await script.until(lambda: not made.registry.ready(pairs=True))


async def test_one_of_a_kind_that_differs_is_set_apart(start_router, fleet, chat, script):
    """Two report the same key, and one of them cannot be reached."""
    p, d, odd = await fleet.prefill("a"), await fleet.decode("a"), await fleet.decode("a")
    fleet.fits = None
    verdicts = {d: True, odd: False}

    async def answer(served):
        if served.target == b"/connect_prefill":
            served.worker.posts.pop()
            served.answer(body=json.dumps({"fits": verdicts[served.worker], "message": WHY}).encode())
        else:
            served.answer()
    p.behaviour = d.behaviour = odd.behaviour = answer
    made = await start_router(prefill=[p], decode=[d, odd], policy="round_robin")
    await script.until(lambda: made.registry.pairs().count == 1)
    assert await served_by(made, chat, [p, d, odd], 4) == [4, 4, 0]


async def test_servers_of_others_are_not_tried(start_router, worker, chat):
    p, d = await worker(disaggregation_mode="prefill"), await worker(disaggregation_mode="decode")
    made = await start_router(prefill=[p], decode=[d])
    assert (await chat(made)).status == 200
    assert len(p.posts) == len(d.posts) == 1 and d.posts[0].target == b"/v1/chat/completions"


async def test_servers_of_two_models_are_not_tried_with_each_other(start_router, fleet, script, warnings):
    p, d = await fleet.prefill("a"), await fleet.decode("a")
    made = await start_router(prefill=[p], decode=[d])
    await ready(made, script)
    others = [Worker(Endpoint.parse(mock.url), role, model_id="another") for mock, role in
              ((await fleet.prefill("b"), "prefill"), (await fleet.decode("b"), "decode"))]
    for other in others:
        made.add_worker(other)
    await script.until(lambda: all(other.pair_key for other in others))
    await script.until(lambda: made.registry.pairs("another").count == 1)
    assert (p, d) in fleet.trials and not warnings()


def test_a_decision_among_kinds_costs_the_same_for_any_number_of_workers(monkeypatch):
    def fake(role, kind, **fields):
        made = Worker(Endpoint.parse(f"http://h:{next(_names) + 1}"), role)
        made.pair_key = kind
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    prefills = tuple(fake("prefill", kind, fitting=frozenset(kind)) for kind in "ab" for _ in range(500))
    decodes = tuple(fake("decode", kind) for kind in "ab" for _ in range(500))
    pairs = Pairs(prefills, decodes)
    assert not pairs.all_fit and pairs.count == 2 * 500 * 500
    monkeypatch.setattr(compatibility, "_fitting", None)  # what walks over workers
    assert pairs.with_partner(pairs.prefills, pairs.decodes) is prefills
    assert pairs.partners(prefills[0], pairs.decodes) is pairs.partners(prefills[1], pairs.decodes)
    assert pairs.partners(prefills[0], pairs.decodes) == decodes[:500]
