"""Paths, request ids, traces and idle connections: forwarded, or added by the router."""

from __future__ import annotations

import asyncio

import pytest

from baton.router.workers.ask import WorkerResponse


def values(served, name: bytes) -> list[bytes]:
    return [value for spelled, value in served.headers if spelled.lower() == name]


@pytest.mark.parametrize("path", [
    "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/anything/of/tomorrow?x=1", "/encode", "/classify",
    "/tokenize", "/api/chat", "/v2/rerank"])
async def test_all_of_a_worker_s_paths_are_relayed(start_router, worker, request_to, path):
    mock = await worker()
    assert (await request_to(await start_router(mock), "POST", path, b'{"input": "x"}')).status == 200
    assert (mock.posts[0].target.decode(), mock.posts[0].body) == (path, b'{"input": "x"}')


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile", "/update_weights_from_disk", "/pause_generation",
                                  "/load_lora_adapter"])
async def test_management_reaches_all_workers(start_router, worker, request_to, path):
    workers = [await worker(), await worker()]
    reply = await request_to(await start_router(*workers), "POST", path, {"model_path": "x"})
    assert (reply.status, reply.json["success"]) == (200, True)
    assert [mock.bodies for mock in workers] == [[b'{"model_path": "x"}']] * 2


async def test_load_of_each_worker(start_router, worker, request_to, script):
    first, second = await worker(), await worker(script.status(404))
    reply = await request_to(await start_router(first, second), "GET", "/get_load")
    assert reply.json["workers"] == [
        {"worker": first.url, "role": "regular", "load": 0, "report": {"ok": True}},
        {"worker": second.url, "role": "regular", "load": 0, "report": None}]


async def test_absolute_form_is_understood(start_router, worker, connect):
    mock = await worker()
    client = await connect(await start_router(mock))
    client.send("POST", "http://anything:80/generate?a=b", b"{}")
    assert (await client.reply()).status == 200
    assert mock.posts[0].target == b"/generate?a=b"
    client.send("GET", "https://anything")
    reply = await client.reply()
    assert (reply.status, reply.json["name"]) == (200, "Baton")  # as for "/"


async def test_body_and_headers_pass_untouched(start_router, worker, request_to):
    """Spelling, order, repeats, odd values and an odd but legal body arrive byte for byte."""
    mock = await worker()
    body = b'{ "prompt" : [1, 2,3] ,"rid":"\xc3\xa4", "priority": 1e3, "cache_salt":null, "a":1,"a":2 }\n'
    given = [(b"X-Custom", b"one"), (b"x-custom", b"two"), (b"Accept", b"a/b;q=0.1"), (b"Cookie", b"k=v; l=w"),
             (b"TraceParent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"), (b"tracestate", b"x=y")]
    lines = b"".join(b"%b: %b\r\n" % pair for pair in given).decode()
    await request_to(await start_router(mock), "POST", "/v1/completions", body, lines)
    assert mock.posts[0].body == body
    assert [pair for pair in mock.posts[0].headers if pair in given] == given
    assert {name.lower() for name, _ in mock.posts[0].headers} - {name.lower() for name, _ in given} == {
        b"host", b"x-request-id", b"content-length"}


@pytest.mark.parametrize(("headers", "expected"), [
    ("X-Request-Id: a\r\n", "a"), ("X-Correlation-Id: b\r\n", "b"), ("X-Trace-Id: c\r\nX-Request-Id: a\r\n", "a"),
    ("X-Request-Id: a\r\nX-Trace-Id: c\r\n", "a"),
])
async def test_request_id_headers(start_router, worker, request_to, headers, expected):
    mock = await worker()
    reply = await request_to(await start_router(mock), "POST", "/generate", b"{}", headers)
    assert (reply.headers["x-request-id"], values(mock.posts[0], b"x-request-id")) == (expected, [expected.encode()])


async def test_own_request_id_headers(start_router, worker, request_to):
    router = await start_router(await worker(), request_id_headers=("X-My-Id",))
    reply = await request_to(router, "POST", "/generate", b"{}", "x-my-id: 7\r\nX-Request-Id: a\r\n")
    assert reply.headers["x-request-id"] == "7"


async def test_idle_clients_are_closed_and_busy_ones_stay(start_router, worker, connect, script):
    router = await start_router(await worker(script.stream("a", "b", "c", "d", pause=0.2)), keep_alive_secs=0.2)
    busy, idle = await connect(router), await connect(router)
    busy.send("POST", "/generate", b"{}")
    assert await asyncio.wait_for(idle.reader.read(), 2) == b""
    assert (await busy.reply()).complete
    assert await asyncio.wait_for(busy.reader.read(), 2) == b""


# ---------------------------------------------------------------------- tracing


@pytest.fixture
def spans(monkeypatch):
    """Trace to memory; the list of finished spans."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    from baton.router import app
    from baton.router.obs.tracing import Tracer

    monkeypatch.setattr(app, "exporter_for", lambda endpoint: memory)
    monkeypatch.setattr(app, "Tracer", lambda exporter: Tracer(exporter, batch=False))
    return memory.get_finished_spans


async def test_a_request_is_a_span_of_the_client_s_trace(start_router, worker, request_to, spans):
    mock = await worker()
    router = await start_router(mock, otlp_traces_endpoint="http://collector/v1/traces")
    trace, parent = "1" * 32, "2" * 16
    await request_to(router, "POST", "/generate", b"{}", f"traceparent: 00-{trace}-{parent}-01\r\n")
    (span,) = spans()
    assert (span.name, f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (
        "router.request", trace, parent)
    assert values(mock.posts[0], b"traceparent") == [f"00-{trace}-{span.context.span_id:016x}-01".encode()]
    assert dict(span.attributes) | {"baton.request_id": ""} == {
        "http.request.method": "POST", "url.path": "/generate", "http.route": "/generate", "baton.worker": mock.url,
        "http.response.status_code": 200, "baton.retries": 0, "baton.request_id": ""}
    assert [event.name for event in span.events] == ["first_token"]


async def test_a_trace_begins_where_the_client_has_none(start_router, worker, request_to, spans, script):
    mock = await worker(script.status(500))
    router = await start_router(mock, enable_trace=True)
    await request_to(router, "POST", "/generate", b"{}", "traceparent: nonsense\r\n")
    (span,) = spans()
    assert span.parent is None
    assert not span.status.is_ok
    assert f"{span.context.trace_id:032x}".encode() in values(mock.posts[0], b"traceparent")[0]


@pytest.mark.parametrize(("endpoint", "package"), [
    ("localhost:4317", "grpc"), ("http://localhost:4318/v1/traces", "http"), ("http://localhost:4317", "grpc")])
def test_exporters(endpoint, package):
    pytest.importorskip(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
    from baton.common.obs.tracing import exporter_for

    exporter = exporter_for(endpoint)
    assert f".{package}." in type(exporter).__module__
    exporter.shutdown()


_NO_TEXT = b'{"messages": [], "user": "\xff", "session_id": "\xff", "bootstrap_room": 1, "\xfe": 2}'


@pytest.mark.parametrize("policy", ["cache_aware", "consistent_hash", "cache_exact"])
@pytest.mark.parametrize("pairs", [False, True], ids=["whole", "pairs"])
async def test_a_body_that_is_no_text_is_answered_and_leaves_no_load(start_router, worker, request_to, policy, pairs):
    """The router refuses such a body if it must decode it; else that is up to the worker."""
    mock = await worker()
    workers = {"prefill": [mock], "decode": [await worker()]} if pairs else {}
    router = await start_router(*([] if pairs else [mock]), policy=policy, max_concurrent_requests=4, **workers)
    reply = await request_to(router, "POST", "/v1/chat/completions", _NO_TEXT)
    assert reply.status == (400 if pairs else 200)
    assert router._gate.admission.running == 0
    assert (await request_to(router, "POST", "/add_worker", b'{"url": "\xff"}')).status == 400


def test_a_response_that_is_no_text_is_empty():
    """Health checks read answers: one that raised would end the watching of its worker for good."""
    assert WorkerResponse(200, b'{"data": "\xff"}').json_object() == {}
