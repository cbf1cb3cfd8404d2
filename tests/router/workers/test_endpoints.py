"""Routes of the endpoints: to one worker, to a pair, to all, to the one that stores the requested object."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

ONE = ["/v1/embeddings", "/v1/classify", "/v1/rerank", "/v1/score", "/v1/tokenize", "/v1/detokenize",
       "/v1/messages/count_tokens",
       "/encode", "/classify", "/rerank", "/score", "/tokenize", "/detokenize", "/parse_function_call",
       "/generate_from_file", "/function_call", "/separate_reasoning", "/get_memory_pool_size", "/get_weights_by_name"]
PAIRS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/invocations"]
ALL = ["/flush_cache", "/update_weights_from_disk", "/update_weights", "/release_memory_occupation",
       "/resume_memory_occupation",
       "/start_profile", "/stop_profile", "/abort_request", "/set_internal_state", "/freeze_gc", "/slow_down",
       "/configure_logging",
       "/update_weight_version", "/begin_weight_update", "/end_weight_update", "/weights_checker",
       "/init_weights_update_group", "/destroy_weights_update_group",
       "/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record"]


@pytest.mark.parametrize("path", ["/generate", "/encode", "/classify", "/v1/rerank"])
async def test_what_may_be_put(start_router, worker, request_to, path):
    """As POST: it takes a pair where it generates."""
    p, d = await worker(), await worker()
    reply = await request_to(await start_router(prefill=[p], decode=[d]), "PUT", path, b'{"text": "a"}')
    assert reply.status == 200
    assert [each.method for each in (*p.posts, *d.posts)] == [b"PUT"] * (1 + (path == "/generate"))


async def test_what_is_put_counts_for_the_limit_of_requests(start_router, worker, request_to, script):
    released = asyncio.Event()

    async def late(served):
        await released.wait()
        served.answer()

    mock = await worker(late)
    router = await start_router(mock, max_concurrent_requests=1, queue_size=0)
    first = asyncio.create_task(request_to(router, "PUT", "/generate", b'{"text": "a"}'))
    await script.until(lambda: mock.posts)
    assert (await request_to(router, "PUT", "/generate", b'{"text": "a"}')).status == 429
    released.set()
    assert (await first).status == 200


@pytest.mark.parametrize("path", ONE)
async def test_one_decode_server_answers_what_needs_no_pair(start_router, worker, request_to, path):
    p, d = await worker(), await worker()
    reply = await request_to(await start_router(prefill=[p], decode=[d]), "POST", path, b'{"input": "a"}')
    assert (reply.status, d.bodies, p.posts) == (200, [b'{"input": "a"}'], [])


@pytest.mark.parametrize("path", PAIRS)
async def test_a_pair_generates(start_router, worker, request_to, path):
    p, d = await worker(), await worker()
    body = b'{"input": [1, 2], "messages": [], "prompt": {"id": "p"}}'
    assert (await request_to(await start_router(prefill=[p], decode=[d]), "POST", path, body)).status == 200
    assert p.bodies == d.bodies
    assert p.bodies[0].endswith(b"," + body[1:])
    assert isinstance(p.posts[0].json["bootstrap_room"], int)


@pytest.mark.parametrize("path", ALL)
async def test_broadcasts_reach_all_servers(start_router, worker, request_to, path):
    p, d = await worker(), await worker()
    reply = await request_to(await start_router(prefill=[p], decode=[d]), "POST", path, b'{"a": 1.50}')
    assert (reply.status, p.bodies, d.bodies) == (200, [b'{"a": 1.50}'], [b'{"a": 1.50}'])


async def test_what_all_servers_refuse_is_the_clients_mistake(start_router, worker, request_to, script):
    router = await start_router(prefill=[await worker(script.status(409))], decode=[await worker(script.status(409))])
    reply = await request_to(router, "POST", "/flush_cache", b"")
    assert (reply.status, sorted(reply.json["workers"].values())) == (409, [409, 409])


@pytest.mark.parametrize(("path", "hint"), [
    ("/parse/function_call", "/parse_function_call"), ("/parse/reasoning", "/separate_reasoning"),
    ("/wasm", "plug-ins"), ("/ha/status", "--router-workers")])
async def test_what_is_not_served_says_what_to_use(start_router, request_to, path, hint):
    reply = await request_to(await start_router(), "POST", path, b"{}")
    assert reply.status == 404
    assert hint in reply.error["message"]


async def test_metrics_of_all_servers_on_one_page(start_router, worker, request_to, script):
    def serves(page, status=200):
        async def serve(served):
            served.answer(status, page)
        return serve

    first = await worker(serves(b'# TYPE x counter\nx_total{m="1"} 3\n'))
    second = await worker(serves(b'# TYPE x counter\nx_total{m="1"} 4\n'))
    router = await start_router(first, second, await worker(serves(b"<html>{", 404)), await worker(serves(b"no {page")))
    reply = await request_to(router, "GET", "/engine_metrics")
    assert (reply.status, reply.headers["content-type"].split(";")[0]) == (200, "text/plain")
    lines = reply.body.decode().splitlines()
    assert [line for line in lines if line.startswith("x_total")] == [
        f'x_total{{m="1",worker_addr="{mock.url}"}} {value}' for mock, value in ((first, "3.0"), (second, "4.0"))]
    assert lines.count("# TYPE x_total counter") == 1


async def test_broadcasts_carry_each_worker_s_key(start_router, worker, request_to):
    """Changes of servers need the router's admin key, and reach the servers with their own."""
    mock = await worker()
    router = await start_router(mock, api_key="client", admin_api_key="admin", worker_api_key="servers'")
    for key, status, count in (("client", 401, 0), ("admin", 200, 1)):
        reply = await request_to(router, "POST", "/flush_cache", b"", f"Authorization: Bearer {key}\r\n")
        assert (reply.status, len(mock.posts)) == (status, count)
    assert dict(mock.posts[0].headers)[b"authorization"] == b"Bearer servers'"


async def test_workers_as_sglang_router_shows_them(start_router, worker, request_to):
    mock = await worker()
    body = (await request_to(await start_router(mock), "GET", "/workers")).json
    assert (body["total"], body["stats"]) == (1, {"regular_count": 1, "prefill_count": 0, "decode_count": 0})
    (shown,) = body["workers"]
    assert shown | {"url": mock.url, "worker_type": "regular", "is_healthy": True, "load": 0, "model_id": "tiny",
                    "connection_mode": "HTTP"} == shown


QUESTIONS = """
/liveness /readiness /health /health_generate /engine_metrics /v1/models /get_model_info /get_server_info /model_info
/server_info /get_server_args /get_max_total_num_tokens /ping
/get_loads /get_load /v1/loads /workers /list_workers /metrics /v1/responses/resp_1 /v1/conversations/conv_1/items
/v1/tokenizers
""".split()


@pytest.mark.parametrize("path", QUESTIONS)
@pytest.mark.parametrize("pairs", [False, True])
async def test_questions_of_sglang_router_s_clients_are_answered(start_router, worker, request_to, path, pairs):
    workers = [await worker() for _ in range(1 + pairs)]
    router = await (start_router(prefill=workers[:1], decode=workers[1:]) if pairs else start_router(*workers))
    assert (await request_to(router, "GET", path)).status == 200


ONE_SERVER = ("/connect_prefill", "/switch_role", "/pd_role_switch")
"""Paths whose requests are for one server."""


async def test_every_endpoint_of_our_servers_is_there(start_router, worker, request_to):
    """Relayed, broadcast, or answered by the router itself."""
    from baton.common.commands.registry import all_endpoints
    from baton.common.serving import app

    router = await start_router(await worker())
    for method, path, _ in (*app.all_routes(all_endpoints()), ("GET", "/openapi.json", None)):
        if path in ONE_SERVER or path.endswith("remote_instance"):
            continue
        reply = await request_to(router, method, re.sub(r"\{[^}]*\}", "name", path), b"{}" if method == "POST" else b"")
        assert reply.status == 200, (method, path, reply.body)


# ---------------------------------------------------------------------- what one worker keeps


async def test_files_and_batches_are_one_worker_s(start_router, worker, request_to):
    workers = [await worker() for _ in range(4)]
    router = await start_router(*workers, policy="round_robin")
    for method, path, body in (("POST", "/v1/files", b"--x\r\n"), ("GET", "/v1/files", b""),
                               ("POST", "/v1/batches", b"{}"), ("GET", "/v1/files/file-1/content", b""),
                               ("DELETE", "/v1/files/file-1", b""),
                               ("POST", "/v1/batches/batch_1/cancel", b""), ("GET", "/v1/batches?limit=2", b"")):
        assert (await request_to(router, method, path, body)).status == 200
    assert sorted(len(mock.posts) for mock in workers) == [0, 0, 0, 7]
    other = await start_router(*reversed(workers))  # another router, or this one after its restart
    await request_to(other, "GET", "/v1/files")
    assert sorted(len(mock.posts) for mock in workers) == [0, 0, 0, 8]


async def test_files_go_to_a_server_that_keeps_some(start_router, worker, request_to):
    for keeper in range(3):
        workers = [await worker(file_storage_path="/x" if i == keeper else None) for i in range(3)]
        router = await start_router(*workers)
        assert (await request_to(router, "POST", "/v1/files", b"--x\r\n")).status == 200
        assert [len(mock.posts) for mock in workers] == [int(i == keeper) for i in range(3)]


async def test_in_pairs_a_decode_server_keeps_files(start_router, worker, request_to):
    p, d = await worker(), await worker()
    router = await start_router(prefill=[p], decode=[d])
    for method in ("POST", "GET"):
        assert (await request_to(router, method, "/v1/files", b"")).status == 200
    assert (len(p.posts), len(d.posts)) == (0, 2)


async def test_files_of_a_worker_that_is_away_are_away(start_router, worker, request_to, script):
    workers = [await worker() for _ in range(3)]
    router = await start_router(*workers)
    await request_to(router, "GET", "/v1/files")
    keeper = next(mock for mock in workers if mock.posts)
    await keeper.stop()
    await script.until(lambda: len(router.registry.available("regular")) == 2)
    reply = await request_to(router, "GET", "/v1/files/file-1")
    assert (reply.status, reply.error["message"]) == (503, "The worker that keeps this is not available now.")
    assert reply.headers["retry-after"] == "1"
    assert (await request_to(router, "POST", f"/remove_worker?url={keeper.url}")).status == 200
    assert (await request_to(router, "GET", "/v1/files")).status == 200


async def test_an_upload_that_fails_is_not_sent_again(start_router, worker, request_to, script):
    workers = [await worker(script.status(500)) for _ in range(2)]
    reply = await request_to(await start_router(*workers), "POST", "/v1/files", b"--x\r\n")
    assert (reply.status, sum(len(mock.posts) for mock in workers)) == (500, 1)


async def test_a_session_stays_with_its_worker(start_router, worker, request_to):
    async def name(served):
        served.answer(body=json.dumps(served.json.get("session_id")).encode())

    workers = [await worker(name) for _ in range(4)]
    router = await start_router(*workers, policy="round_robin")
    homes = set()
    for _ in range(12):
        session = (await request_to(router, "POST", "/open_session", b'{"capacity_of_str_len": 1000}')).json
        (home,) = [mock for mock in workers if any(served.target == b"/open_session" and served.json == {
            "capacity_of_str_len": 1000, "session_id": session} for served in mock.posts)]
        before = len(home.posts)
        for path, body in (("/generate", {"text": "a", "session_params": {"id": session}}),
                           ("/v1/chat/completions", {"messages": [], "session_params": {"id": session, "rid": None}}),
                           ("/close_session", {"session_id": session})):
            assert (await request_to(router, "POST", path, body)).status == 200
        assert len(home.posts) == before + 3
        homes.add(home.port)
    assert len(homes) > 1


async def test_a_session_of_pairs_stays_with_its_decode_server(start_router, worker, request_to):
    prefills, decodes = [await worker() for _ in range(2)], [await worker() for _ in range(3)]
    router = await start_router(prefill=prefills, decode=decodes, policy="round_robin")
    await request_to(router, "POST", "/open_session", {"capacity_of_str_len": 10, "session_id": "mine"})
    for _ in range(6):
        await request_to(router, "POST", "/generate", {"text": "a", "session_params": {"id": "mine"}})
    assert sorted(len(mock.posts) for mock in decodes) == [0, 0, 7]
    assert [len(mock.posts) for mock in prefills] == [3, 3]


async def test_our_decode_servers_serve_a_session_alone(start_router, worker, request_to):
    """They take its past from what they remember; a prefill server would know only what is new."""
    p, decodes = await worker(), [await worker(stream_continuation=True) for _ in range(3)]
    router = await start_router(prefill=[p], decode=decodes)
    for _ in range(3):
        reply = await request_to(router, "POST", "/generate", {"text": "a", "session_params": {"id": "mine"}})
        assert reply.status == 200
    assert (sorted(len(mock.posts) for mock in decodes), p.posts) == ([0, 0, 3], [])
    assert not any("bootstrap_room" in served.json for mock in decodes for served in mock.posts)


async def test_errors_have_the_api_s_form(start_router, request_to):
    router = await start_router()
    body = (await request_to(router, "POST", "/v1/messages", {"messages": []})).json
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
    assert (await request_to(router, "GET", "/v1/messages")).json["error"]["type"] == "invalid_request_error"
    assert (await request_to(router, "POST", "/v1/responses", {})).error["code"] == "worker_unavailable"


async def test_a_new_session_falls_to_a_worker_that_is_there(start_router, worker, request_to, script):
    workers = [await worker() for _ in range(3)]
    router = await start_router(*workers)
    for mock in workers[1:]:
        await mock.stop()
    await script.until(lambda: len(router.registry.available("regular")) == 1)
    for _ in range(5):
        assert (await request_to(router, "POST", "/open_session", {"capacity_of_str_len": 10})).status == 200
    assert (await request_to(router, "POST", "/open_session", b"[1]")).status == 200  # the worker says what is wrong
    assert len(workers[0].posts) == 6


# ---------------------------------------------------------------------- the end of a broken stream


@pytest.mark.parametrize(("path", "first", "expected"), [
    ("/v1/chat/completions", "data: ", ["error", "message"]),
    ("/v1/messages", "event: error\ndata: ", ["error", "message"]),
    ("/v1/responses", "event: error\ndata: ", ["message"]),
])
async def test_a_broken_stream_ends_in_its_api_s_form(start_router, worker, request_to, path, first, expected):
    async def break_off(served):
        served.head()
        served.event("one")
        await asyncio.sleep(0.02)
        served.die()

    router = await start_router(await worker(break_off))
    reply = await request_to(router, "POST", path, {"stream": True, "temperature": 0})
    *_, last = [event for event in reply.body.decode().split("\n\n") if event]
    assert last.startswith(first)
    body = json.loads(last.removeprefix(first))
    assert path == "/v1/chat/completions" or body["type"] == "error"
    for key in expected:
        body = body[key]
    assert body == "The worker closed its connection before the end of the answer."


@pytest.mark.parametrize("pairs", [False, True])
async def test_the_root_says_what_this_is_and_links_what_is_there(start_router, worker, request_to, pairs):
    router = await start_router(await worker(), api_key="k") if not pairs else await start_router(
        prefill=[await worker()], decode=[await worker()], api_key="k")
    reply = await request_to(router, "GET", "/")
    assert reply.status == 200 and ("pairs" in reply.json["description"]) == pairs
    for path in reply.json["links"]:
        response = await request_to(router, "GET", path, headers="Authorization: Bearer k\r\n")
        assert response.status == 200, path
    page = await request_to(router, "GET", "/", headers="Accept: text/html,*/*\r\n")
    assert page.headers["content-type"].startswith("text/html") and b'<a href="/dashboard">' in page.body
    assert (await request_to(router, "HEAD", "/")).status == 200
    assert (await request_to(router, "POST", "/", b"{}")).status == 405
