"""Which key opens which route of a server, over all routes that there are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from baton.common.api.errors import WorkerUnavailable
from baton.common.commands.registry import all_endpoints
from baton.common.config.cli import build
from baton.common.config.server import ServerConfig
from baton.common.engine_client.client import EngineClient
from baton.common.models.registry import load_model_spec
from baton.common.serving.app import make_app
from baton.common.serving.context.serving_context import ServingContext

OPEN = {"/", "/health", "/health_generate", "/ping", "/metrics"}
INFERENCE = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel", "/v1/messages",
    "/v1/messages/count_tokens", "/generate", "/generate_from_file", "/vertex_generate", "/invocations",
    "/v1/tokenize", "/tokenize",
    "/v1/detokenize",
    "/detokenize",
    "/parse_function_call", "/function_call", "/separate_reasoning", "/v1/files", "/v1/files/{file_id}", "/v1/batches",
    "/v1/batches/{batch_id}/cancel", "/abort_request", "/v1/embeddings", "/encode", "/classify", "/v1/classify",
    "/v1/rerank",
    "/rerank",
    "/v1/score", "/score", "/open_session", "/close_session", "/get_memory_pool_size",
    "/connect_prefill"}  # as the bootstrap_host of a request does, and with the key that routers have
"""What clients may do beside asking. A route that changes anything else is an administrator's."""
CHANGING = {endpoint.path for endpoint in all_endpoints()} | {"/configure_logging"}


@pytest.fixture
async def served(checkpoint: Path, request: pytest.FixtureRequest,
                 monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[web.Application, TestClient]]:
    config = build(ServerConfig, {"model_path": str(checkpoint), **request.param})
    client = EngineClient(4, lambda message: None)

    async def no_engine(*_: object) -> NoReturn:  # routes that ask it would wait for seconds
        raise WorkerUnavailable("No engine runs.")

    monkeypatch.setattr(client._rpc, "call", no_engine)
    app = make_app(ServingContext(config, load_model_spec(config.model), client))
    async with TestClient(TestServer(app)) as http:
        yield app, http
    client.channel.close()


def routes(app: web.Application) -> list[tuple[str, str]]:
    return [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]


async def opens(http: TestClient, method: str, path: str, key: str | None, **options) -> bool:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    filled = path.replace("{", "").replace("}", "")
    async with http.request(method, filled, headers=headers, data=b"", **options) as answer:
        return answer.status != 401


@pytest.mark.parametrize("served", [{"api_key": "client", "admin_api_key": "admin"}], indirect=True)
async def test_each_route_takes_its_key_and_no_lesser_one(served):
    app, http = served
    found = routes(app)
    assert len(found) > 70
    for method, path in found:
        asks = method in ("GET", "HEAD") and path not in CHANGING
        assert await opens(http, method, path, None) is (path in OPEN), (method, path)
        assert await opens(http, method, path, "client") is (asks or path in INFERENCE), (method, path)
        assert await opens(http, method, path, "admin"), (method, path)
        assert not await opens(http, method, path, "wrong") or path in OPEN


@pytest.mark.parametrize("served", [{"api_key": "client", "admin_api_key": "admin"}], indirect=True)
@pytest.mark.parametrize("path", ["/%66lush_cache", "/v1/../flush_cache", "/./flush_cache", "//flush_cache"])
async def test_another_spelling_of_a_path_opens_nothing(served, path):
    _, http = served
    url = http.make_url("/").with_path(path, encoded=True)
    async with (aiohttp.ClientSession() as session,
                session.post(url, headers={"Authorization": "Bearer client"}) as answer):
        assert answer.status in (401, 404)


@pytest.mark.parametrize("served", [{"admin_api_key": "admin"}], indirect=True)
async def test_an_administrator_s_key_alone_leaves_clients_free(served):
    app, http = served
    for method, path in routes(app):
        asks = method in ("GET", "HEAD") and path not in CHANGING
        assert await opens(http, method, path, None) is (asks or path in INFERENCE), (method, path)


@pytest.mark.parametrize("served", [{"api_key": "client", "admin_api_key": "admin"}], indirect=True)
async def test_all_requests_are_aborted_by_an_administrator(served):
    _, http = served
    for key, body, status in (("client", {"abort_all": True}, 401), ("client", {"rid": "a"}, 200),
                              ("admin", {"abort_all": True}, 200)):
        async with http.post("/abort_request", json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == status
