"""Workers of several models at one router: which gets a request, what /v1/models shows, and state by model."""

from __future__ import annotations

import json
from random import Random

import pytest

from baton.common.api.errors import ConfigError
from baton.router.config.endpoint import Endpoint
from baton.router.config.policy import PolicyArgs
from baton.router.config.workers import WorkerArgs
from baton.router.net.request import Request
from baton.router.policies import PolicySets
from baton.router.policies.cache_aware import MAX_BLOCKS
from baton.router.policies.load_view import EXACT_UP_TO
from baton.router.workers.models import ModelNotFound, Models
from baton.router.workers.registry import Registry, Worker
from baton.router.workers.roles import WORKER_ROLES


def made(*names: str, role: str = "regular") -> Worker:
    worker = Worker(Endpoint.parse(f"http://h{made.count}:1"), role)
    made.count += 1
    worker.model_ids = names
    return worker


made.count = 0


def models_of(*workers: Worker, pairs: bool = False, **options) -> Models:
    models = Models(**options)
    models.update(workers, pairs=pairs)
    return models


# ---------------------------------------------------------------------- which group


def test_a_router_of_one_model_takes_any_name():
    models = models_of(made("tiny"), made("tiny"), made())
    assert not models.checked
    assert {models.group(name) for name in ("tiny", "gpt-4", "")} == {None}


def test_names_that_differ_are_told_apart():
    models = models_of(made("a"), made("b"))
    assert models.checked
    assert [models.group(name) for name in ("a", "b", "")] == ["a", "b", "a"]
    with pytest.raises(ModelNotFound, match="`c` does not exist. There are: a, b") as missing:
        models.group("c")
    assert (missing.value.status, missing.value.code, missing.value.param) == (404, "model_not_found", "model")


def test_a_worker_that_tells_no_names_takes_any():
    silent = made()
    models = models_of(made("a"), made("b"), silent)
    assert models.group("c") == ""
    assert all(models.serves(silent, group) for group in (None, "", "a", "b"))


def test_adapters_are_names_of_one_model():
    models = models_of(made("base"), made("base", "one"), made("one", "two"))
    assert [models.group(name) for name in ("base", "one", "two", "gpt-4")] == ["base", "one", "two", "base"]


def test_strict_names_count_with_one_model_too():
    models = models_of(made("tiny"), strict=True)
    assert models.group("tiny") == models.group("") == "tiny"
    with pytest.raises(ModelNotFound):
        models.group("gpt-4")
    assert models_of(strict=True).group("gpt-4") is None  # without workers their absence is reported


def test_pairs_default_to_a_model_that_both_roles_serve():
    models = models_of(made("a", role="prefill"), made("b", role="prefill"), made("b", role="decode"), pairs=True)
    assert models.group("") == "b"


@pytest.mark.parametrize(("flags", "sentence"), [
    (("x",), "takes ALIAS=NAME, not 'x'"), (("=x",), "takes ALIAS=NAME"), (("x=",), "takes ALIAS=NAME"),
    (("x=a", "x=b"), "names x more than once")])
def test_malformed_aliases_are_refused(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        WorkerArgs(model_alias=flags)


# ---------------------------------------------------------------------- the registry's index


def test_what_does_not_change_stays_the_same_object():
    registry, workers = Registry(), [made("a"), made("a"), made("b")]
    for worker in workers:
        registry.add(worker)
        registry.record_check_passed(worker)
    of_a, of_b = registry.available("regular", "a"), registry.available("regular", "b")
    assert (of_a, of_b) == ((workers[0], workers[1]), (workers[2],))
    registry.record_check_failed(workers[2], certain=True)
    assert registry.available("regular", "a") is of_a
    assert registry.available("regular", "b") == ()
    registry.learn_models(workers[1], [{"id": "b"}])
    assert registry.available("regular", "a") == (workers[0],)
    assert registry.available("regular", "b") == (workers[1],)


def test_a_named_model_is_not_asked_for():
    registry, worker = Registry(), Worker(Endpoint.parse("http://h:1"), model_id="mine")
    registry.add(worker)
    registry.learn_models(worker, [{"id": "theirs"}])
    assert worker.model_ids == ("mine",)


# ---------------------------------------------------------------------- per-model policies


@pytest.mark.parametrize("name", ["cache_aware", "cache_exact", "round_robin", "consistent_hash", "least_loaded"])
def test_policies_of_models_are_apart(name):
    sets = PolicySets(dict.fromkeys(WORKER_ROLES, name), PolicyArgs(policy=name), Random(1))
    one, other = sets.of("a")["regular"], sets.of("b")["regular"]
    assert one is not other
    assert one is sets.of("a")["regular"]
    assert sets.of(None) is sets.common


def test_models_share_what_workers_tell_and_the_bound_on_memory():
    sets = PolicySets(dict.fromkeys(WORKER_ROLES, "cache_exact"), PolicyArgs(policy="cache_exact"), Random(1))
    one, other = sets.of("a")["prefill"], sets.of("b")["decode"]
    assert one.kv_index is other.kv_index is sets.exact.kv_index
    assert one.costs.memory is other.costs.memory is sets.exact.costs.memory
    assert one.texts is not other.texts
    aware = PolicySets(dict.fromkeys(WORKER_ROLES, "cache_aware"), PolicyArgs(), Random(1))
    for group in "abc":
        aware.of(group)
    assert sum(aware.of(group)["regular"].max_blocks for group in (None, *"abc")) == MAX_BLOCKS
    aware.sweep(0.0, "ab")
    assert aware.of(None)["regular"].max_blocks == MAX_BLOCKS // 3


@pytest.mark.parametrize("name", ["cache_aware", "cache_exact", "least_loaded", "prefix_hash", "consistent_hash"])
def test_policies_of_a_removed_model_follow_no_loads(name):
    sets = PolicySets(dict.fromkeys(WORKER_ROLES, name), PolicyArgs(policy=name), Random(1))
    fleet = tuple(made("a") for _ in range(EXACT_UP_TO + 1))
    policy, request = sets.of("a")["regular"], Request()
    policy.choose(fleet, policy.read(request, None))
    assert all(worker.load_orders for worker in fleet)
    sets.sweep(0.0, ["b"])
    assert not any(worker.load_orders for worker in fleet)


def test_turns_of_models_do_not_mix():
    """Requests of two models alternately: with one count for both, each model would use one of its workers only."""
    sets = PolicySets(dict.fromkeys(WORKER_ROLES, "round_robin"), PolicyArgs(policy="round_robin"), Random(1))
    fleets = {"a": [made("a"), made("a")], "b": [made("b"), made("b")]}
    chosen = [sets.of(group)["regular"].choose(fleets[group], None).worker for _ in range(4) for group in "ab"]
    assert all(chosen.count(worker) == 2 for fleet in fleets.values() for worker in fleet)


# ---------------------------------------------------------------------- through the router


@pytest.mark.parametrize(("path", "prompt"), [
    ("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "x"}), ("/generate", {"text": "x"}),
    ("/v1/embeddings", {"input": "x"}), ("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": []}),
    ("/v1/rerank", {"query": "x"}), ("/tokenize", {"prompt": "x"}), ("/v1/images/generations", {"prompt": "x"})])
async def test_requests_go_to_workers_of_their_model(start_router, worker, request_to, path, prompt):
    a, b, other = await worker(models=["a"]), await worker(models=["b"]), await worker(models=["a"])
    router = await start_router(a, b, other)
    for turn in range(4):
        assert (await request_to(router, "POST", path, {"model": "b", "turn": turn, **prompt})).status == 200
    assert len(b.posts) == 4
    assert not a.posts + other.posts
    assert (await request_to(router, "POST", path, prompt)).status == 200  # names none: the first model
    assert len(b.posts) == 4


async def test_a_model_that_no_worker_serves_is_not_found(start_router, worker, chat, request_to):
    router = await start_router(await worker(models=["a"]), await worker(models=["b"]))
    reply = await chat(router, model="c")
    assert (reply.status, reply.error["code"], reply.error["param"], reply.error["type"]) == (
        404, "model_not_found", "model", "invalid_request_error")
    anthropic = await request_to(router, "POST", "/v1/messages", {"model": "c", "messages": []})
    assert (anthropic.status, anthropic.error["type"]) == (404, "not_found_error")
    assert (await chat(router, model=7)).status == 200  # no name: a worker says what is wrong with it


async def test_a_model_whose_workers_are_away_is_unavailable(start_router, worker, chat, script):
    a, b = await worker(models=["a"]), await worker(models=["b"])
    router = await start_router(a, b, retry_max_retries=0)
    b.health = 500
    await script.until(lambda: len(router.registry.available("regular")) == 1)
    reply = await chat(router, model="b")
    assert (reply.status, reply.error["message"]) == (503, "No healthy worker is available for the model `b`.")
    assert not a.posts


async def test_retries_stay_with_the_model(start_router, worker, chat, script):
    a, b, c = await worker(models=["a"]), await worker(script.die, models=["b"]), await worker(models=["b"])
    router = await start_router(a, b, c)
    for _ in range(4):
        assert (await chat(router, model="b")).status == 200
    assert len(c.posts) == 4
    assert not a.posts
    c.behaviour = script.status(503)
    assert (await chat(router, model="b")).status == 503
    assert not a.posts


async def test_models_of_all_workers_are_shown(start_router, worker, request_to):
    a, b = await worker(models=["a"]), await worker(models=["b", "org/c"])
    router = await start_router(a, b, model_alias=("gpt-4=b", "gone=nobody"))
    shown = (await request_to(router, "GET", "/v1/models")).json
    assert shown == {"object": "list", "data": [
        {"id": "a", "object": "model", "owned_by": a.url}, {"id": "b", "object": "model", "owned_by": b.url},
        {"id": "org/c", "object": "model", "owned_by": b.url},
        {"id": "gpt-4", "object": "model", "owned_by": b.url, "root": "b"}]}
    for name, shown in (("a", "a"), ("org/c", "org/c"), ("org%2Fc", "org/c"), ("gpt-4", "gpt-4")):
        assert (await request_to(router, "GET", f"/v1/models/{name}")).json["id"] == shown
    missing = await request_to(router, "GET", "/v1/models/d")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert not a.posts + b.posts


async def test_an_alias_is_sent_by_its_real_name(start_router, worker, request_to):
    a, b = await worker(models=["a"]), await worker(models=["b"])
    router = await start_router(a, b, model_alias=("gpt-4=b",))
    body = b'{ "n": 1.50, "model" : "gpt\\u002d4", "messages": [ ] }'
    assert (await request_to(router, "POST", "/v1/chat/completions", body)).status == 200
    assert not a.posts
    (served,) = b.posts
    assert served.json == {"n": 1.5, "model": "b", "messages": []}
    assert b"1.50" in served.body


async def test_aliases_of_the_only_model(start_router, worker, chat):
    mock = await worker()
    router = await start_router(mock, model_alias=("gpt-4=tiny",))
    for name in ("gpt-4", "gpt-5", "tiny"):
        assert (await chat(router, model=name)).status == 200
    assert [served.json["model"] for served in mock.posts] == ["tiny", "gpt-5", "tiny"]


async def test_pairs_are_of_one_model(start_router, worker, chat):
    prefills = [await worker(disaggregation_mode="prefill", models=[name]) for name in "ab"]
    decodes = [await worker(disaggregation_mode="decode", models=[name]) for name in "ba"]
    router = await start_router(prefill=prefills, decode=decodes)
    for turn in range(6):
        assert (await chat(router, model="ab"[turn % 2])).status == 200
    for mock in prefills + decodes:
        assert {served.json["model"] for served in mock.posts} == set(mock.models)
        assert len(mock.posts) == 3
    assert (await chat(router, model="c")).status == 404


async def test_workers_that_share_no_model_make_no_pair(start_router, worker, chat, request_to):
    prefill = await worker(disaggregation_mode="prefill", models=["a"])
    decode = await worker(disaggregation_mode="decode", models=["b"])
    router = await start_router(prefill=[prefill], decode=[decode], retry_max_retries=0)
    reply = await chat(router, model="a")
    assert (reply.status, reply.error["message"]) == (503, "No healthy decode worker is available for the model `a`.")
    assert (await request_to(router, "GET", "/readiness")).status == 503
    assert not prefill.posts + decode.posts


async def test_a_session_stays_within_its_model(start_router, worker, request_to):
    a, b = await worker(models=["a"]), await worker(models=["b"])
    router = await start_router(a, b)
    for turn in range(4):
        asked = {"model": "b", "text": "x", "session_params": {"id": f"s{turn}"}}
        assert (await request_to(router, "POST", "/generate", asked)).status == 200
    assert len(b.posts) == 4


async def test_adapters_that_come_and_go_are_noticed(start_router, worker, chat, request_to, script):
    a, b = await worker(models=["a"]), await worker(models=["b"])
    router = await start_router(a, b)
    assert (await chat(router, model="one")).status == 404
    b.models = ["b", "one"]
    await request_to(router, "POST", "/load_lora_adapter", {"lora_name": "one"})
    assert (await chat(router, model="one")).status == 200
    assert b.posts[-1].json["model"] == "one"


def test_a_request_costs_no_more_with_more_models():
    """The group takes one lookup; nothing is walked."""
    models = models_of(*(made(f"m{index}") for index in range(1000)))
    walked = []
    models._cards = type("Counted", (dict,), {"__iter__": lambda self: walked.append(1)})(models._cards)
    assert models.group("m999") == "m999"
    assert not walked
    assert Request().group is None


# ---------------------------------------------------------------------- files and batches


def store(mock):
    """A worker's behaviour: it keeps files and batches."""
    stored: dict[str, dict] = {}

    async def serve(served):
        _, _, kind, *name = served.target.partition(b"?")[0].decode().split("/")
        if served.method == b"POST" and not name:
            made = f"{kind[:4]}-{mock.models[0]}{len(stored)}"
            stored[f"{kind}/{made}"] = {"id": made, "created_at": len(stored)}
            served.answer(body=json.dumps(stored[f"{kind}/{made}"]).encode())
        elif not name:
            data = [thing for key, thing in stored.items() if key.startswith(kind)]
            served.answer(body=json.dumps({"object": "list", "data": data, "has_more": False}).encode())
        else:
            thing = stored.get(f"{kind}/{name[0]}")
            served.answer(200 if thing else 404, json.dumps(thing or {"error": {"message": "unknown"}}).encode())

    return serve


def upload(*lines: dict) -> bytes:
    content = "\n".join(json.dumps({"body": line}) for line in lines)
    head = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return f"{head}{content}\r\n--x--\r\n".encode()


@pytest.fixture
async def stores(start_router, worker):
    """``router, {model: worker}``: two workers a model, and an alias."""
    mocks = [await worker(models=[name], file_storage_path="/x") for name in "abab"]
    for mock in mocks:
        mock.behaviour = store(mock)
    return await start_router(*mocks, model_alias=("gpt-4=b",)), mocks


@pytest.mark.parametrize(("named", "model"), [("a", "a"), ("b", "b"), ("gpt-4", "b"), (None, "a")])
async def test_a_batch_is_done_by_a_worker_of_its_model(stores, request_to, named, model):
    router, mocks = stores
    line = {"messages": []} if named is None else {"model": named, "messages": []}
    file = (await request_to(router, "POST", "/v1/files", upload(line, line))).json
    batch = (await request_to(router, "POST", "/v1/batches", {"input_file_id": file["id"]})).json
    assert (file["id"][5], batch["id"][5]) == (model, model)
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{batch['id']}",
                 f"/v1/batches/{batch['id']}/cancel"):
        assert (await request_to(router, "POST" if "cancel" in path else "GET", path)).status == 200
    assert (await request_to(router, "DELETE", f"/v1/files/{file['id']}")).status == 200


async def test_lists_hold_what_all_models_have(stores, request_to):
    router, _ = stores
    made = [(await request_to(router, "POST", "/v1/files", upload({"model": name}))).json["id"] for name in "abba"]
    listed = (await request_to(router, "GET", "/v1/files?limit=9")).json
    assert sorted(thing["id"] for thing in listed["data"]) == sorted(made)
    assert [thing["created_at"] for thing in listed["data"]] == [1, 1, 0, 0]
    assert (await request_to(router, "GET", "/v1/batches")).json["data"] == []


async def test_what_no_worker_stores_is_not_found(stores, request_to, script):
    router, mocks = stores
    for method, path, body in (("GET", "/v1/files/no", {}), ("POST", "/v1/batches", {"input_file_id": "no"})):
        assert (await request_to(router, method, path, body)).status in (404, 200)
    assert (await request_to(router, "GET", "/v1/files/no")).json["error"]["message"] == "unknown"
    assert (await request_to(router, "POST", "/v1/files", upload({"model": "c"}))).status == 404
    for mock in mocks:
        if mock.models == ["b"]:
            await mock.stop()
    await script.until(lambda: len(router.registry.available("regular")) == 2)
    for path in ("/v1/files/no", "/v1/files", "/v1/batches/no"):  # one that is away may have it
        assert (await request_to(router, "GET", path)).status == 503
