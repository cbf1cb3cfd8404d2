"""Kubernetes discovery against an API server that lists and watches pods over HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from baton.common.api.errors import ConfigError
from baton.common.config.cli import build
from baton.router.config import RouterConfig

pytest.importorskip("kubernetes")


class ApiServer:
    """Pods by name; every change is an event to whoever watches with a selector that matches."""

    def __init__(self):
        self.pods: dict[str, dict] = {}
        self.version = 1
        self.watches: list[tuple[dict, asyncio.Queue]] = []
        self.paths: list[str] = []

    def change(self, kind: str, name: str, *, labels=None, ip="127.0.0.1", phase="Running", deleting=False,
               annotations=None):
        self.version += 1
        if kind == "DELETED":
            pod = self.pods.pop(name)
        else:
            pod = {"metadata": {"name": name, "uid": f"uid-{name}", "labels": labels or {"app": "x"},
                                "annotations": annotations, "resourceVersion": str(self.version),
                                **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {})},
                   "status": {"phase": phase, "podIP": ip}, "kind": "Pod", "apiVersion": "v1"}
            self.pods[name] = pod
        for selector, queue in self.watches:
            if matches(selector, pod):
                queue.put_nowait({"type": kind, "object": pod})

    def cut(self) -> None:
        for _, queue in self.watches:
            queue.put_nowait(None)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        selector = dict(item.split("=") for item in request.query["labelSelector"].split(","))
        if request.query.get("watch", "").lower() != "true":
            pods = [pod for pod in self.pods.values() if matches(selector, pod)]
            return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": pods,
                                      "metadata": {"resourceVersion": str(self.version)}})
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue = asyncio.Queue()
        self.watches.append((selector, queue))
        while (event := await queue.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        self.watches = [watch for watch in self.watches if watch[1] is not queue]
        return response


def matches(selector: dict, pod: dict) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


@pytest.fixture
async def api(tmp_path, monkeypatch):
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/api/v1/{tail:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u", "user": {}}]}))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    yield server
    server.cut()
    await runner.cleanup()


async def test_pods_join_and_leave(api, start_router, worker, chat, script):
    mock = await worker()
    api.change("ADDED", "first")
    api.change("ADDED", "other", labels={"app": "y"}, ip="127.0.0.9")
    router = await start_router(service_discovery=True, selector=("app=x",), service_discovery_port=mock.port,
                                wait=False)
    await script.until(lambda: router.registry.available("regular"))
    assert (await chat(router)).status == 200
    assert [w.url for w in router.registry] == [mock.url]
    await script.until(lambda: api.watches)
    api.change("ADDED", "second", phase="Pending", ip="127.0.0.2")
    api.change("MODIFIED", "first", deleting=True)
    await script.until(lambda: not len(router.registry))
    api.change("MODIFIED", "second", ip="127.0.0.2")
    await script.until(lambda: [w.endpoint.host for w in router.registry] == ["127.0.0.2"])
    assert set(api.paths) == {"/api/v1/pods"}


async def test_a_missed_deletion_is_caught_up_with(api, start_router, worker, script):
    mock = await worker()
    api.change("ADDED", "first")
    router = await start_router(service_discovery=True, selector=("app=x",), service_discovery_port=mock.port,
                                service_discovery_namespace="ns", wait=False)
    await script.until(lambda: len(router.registry) and api.watches)
    del api.pods["first"]  # No event: the watch was not there when it happened.
    api.cut()
    await script.until(lambda: not len(router.registry), 5)
    assert set(api.paths) == {"/api/v1/namespaces/ns/pods"}


async def test_pairs_and_their_bootstrap_port(api, start_router, worker, script):
    mock = await worker()
    api.change("ADDED", "p", labels={"role": "p", "app": "x"}, annotations={"sglang.ai/bootstrap-port": "9123"})
    api.change("ADDED", "d", labels={"role": "d", "app": "x"}, ip="127.0.0.2")
    router = await start_router(service_discovery=True, pd_disaggregation=True, prefill_selector=("app=x role=p",),
                                decode_selector=("app=x", "role=d"), service_discovery_port=mock.port, wait=False)
    await script.until(lambda: len(router.registry) == 2)
    assert {w.endpoint.host: (w.role, w.bootstrap_port if w.role == "prefill" else None) for w in router.registry} == {
        "127.0.0.1": ("prefill", 9123), "127.0.0.2": ("decode", None)}


async def test_a_pod_of_several_ranks_joins_and_leaves_whole(api, start_router, worker, script):
    mock = await worker(dp_size=3)
    api.change("ADDED", "first")
    router = await start_router(service_discovery=True, selector=("app=x",), service_discovery_port=mock.port,
                                dp_aware=True, wait=False)
    await script.until(lambda: len(router.registry.available("regular")) == 3 and api.watches)
    api.change("DELETED", "first")
    await script.until(lambda: not len(router.registry))


async def test_workers_that_came_otherwise_stay(api, start_router, worker, script):
    mock = await worker()
    api.change("ADDED", "first")
    router = await start_router(mock, service_discovery=True, selector=("app=x",), service_discovery_port=mock.port)
    await script.until(lambda: api.watches)
    api.change("DELETED", "first")
    await asyncio.sleep(0.1)
    assert [w.url for w in router.registry] == [mock.url]


@pytest.mark.parametrize(("flags", "match"), [
    ({"service_discovery": True}, "needs --selector"), ({"selector": ("a=b",)}, "need --service-discovery"),
    ({"service_discovery": True, "selector": ("ab",)}, "KEY=VALUE"),
    ({"service_discovery": True, "selector": ("a=b",), "pd_disaggregation": True}, "--prefill-selector"),
])
def test_bad_flags(flags, match):
    with pytest.raises(ConfigError, match=match):
        build(RouterConfig, flags)
