"""The router's own endpoints: health, metrics, membership, broadcasts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qs

import msgspec

from ...common.api.errors import InvalidRequest
from ...common.api.unreadable import UNREADABLE
from ...common.commands.registry import refuse_taken_paths
from ...common.obs.about_page import POLICY, about
from ..config.endpoint import Endpoint
from ..config.workers import parse_bootstrap_port
from ..monitoring import dashboard
from ..monitoring.cluster_view import ClusterView
from ..monitoring.engine_metrics import merge
from ..net.request import Request
from ..net.responses import Response
from ..relay.dispatcher import RETRY_AFTER_SECONDS
from ..routes import RELAYED, broadcasts
from ..workers.ask import ask_models, get
from ..workers.compatibility import misfits_of
from ..workers.dp_ranks import report_of, server_url
from ..workers.registry import Worker, WorkerMetadata
from ..workers.roles import REGULAR, roles_of
from .switch_role import switch_role
from .weight_updates import HANDLERS
from .worker_answers import ask_all, combined, servers

Handler = Callable[[ClusterView, Request], Response | Coroutine[Any, Any, Response]]
_BROADCAST_SECONDS = 30.0
_REPORT_SECONDS = 5.0
_FIRST_CHECK_SECONDS, _POLL_SECONDS = 1.0, 0.002
_FOREVER = 24 * 3600.0


_LINKS = {
    "/dashboard": "the cluster live", "/list_workers": "its workers", "/readiness": "whether it could serve now",
    "/health": "whether it runs", "/v1/models": "the models that its workers serve", "/metrics": "Prometheus metrics",
    "/engine_metrics": "those of its workers", "/openapi.json": "every endpoint of a worker with its fields"}


def root(router: ClusterView, request: Request) -> Response:
    """Describes the router, with links to its other endpoints."""
    pairs = router.config.workers.pd_disaggregation
    before = "pairs of prefill and decode servers" if pairs else "whole servers"
    what = f"This is a router before {before}. It speaks OpenAI's API."
    as_html = b"text/html" in request.headers
    kind = "text/html; charset=utf-8" if as_html else "application/json"
    return Response(200, about(what, _LINKS, as_html=as_html), kind,
                    (("content-security-policy", POLICY), ("vary", "accept")) if as_html else (("vary", "accept"),))


def liveness(router: ClusterView, request: Request) -> Response:
    """200 while the process runs, whatever its workers do."""
    return Response.json({"status": "ok"})


def readiness(router: ClusterView, request: Request) -> Response:
    """200 when a request could be served now, else 503."""
    if router.registry.ready(pairs=router.config.workers.pd_disaggregation):
        states = [worker.state for worker in router.registry]
        return Response.json({"status": "ready", "healthy_workers": states.count("healthy"),
                              "total_workers": len(states)})
    return Response(503, msgspec.json.encode({"status": "not ready", "workers": router.counts(),
                                              "misfits": misfits_of(router.registry)}),
                    headers=(("retry-after", f"{RETRY_AFTER_SECONDS:g}"),))


def metrics(router: ClusterView, request: Request) -> Response:
    return Response(200, router.metrics.render(), "text/plain; version=0.0.4; charset=utf-8")


def list_workers(router: ClusterView, request: Request) -> Response:
    workers = [worker.describe() for worker in router.registry]
    return Response.json({"urls": [worker["url"] for worker in workers], "workers": workers})


async def add_worker(router: ClusterView, request: Request) -> Response:
    """Registers a worker; it takes requests once it answers /health. 409 when its URL is taken."""
    worker = worker_from(parameters_of(request), pairs=router.config.workers.pd_disaggregation)
    await register(router, worker)
    return Response.json({"message": f"Worker {worker.url} is added; it takes requests once it is healthy.",
                          "worker": worker.describe()})


async def register(router: ClusterView, worker: Worker) -> None:
    """Registers a worker, and waits a moment for its first check, so that the next request sees it healthy if it is.
    Raises Conflict."""
    loop = router.dispatcher.loop
    deadline = loop.time() + _FIRST_CHECK_SECONDS
    router.add_worker(worker)
    while not worker.checked and worker in router.registry and loop.time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)


def remove_worker(router: ClusterView, request: Request) -> Response:
    """Unregisters a worker; its running requests end undisturbed, with ``force=true`` they are cut. 404 when it is
    unknown."""
    return remove_at(router, request, _endpoint(parameters_of(request)).url)


def remove_at(router: ClusterView, request: Request, url: str) -> Response:
    workers = router.remove_worker(url, force=_boolean(parameters_of(request), "force"))
    return Response.json({"message": f"Worker {url} is removed.", "running": sum(worker.load for worker in workers)})


def drain_worker(router: ClusterView, request: Request) -> Response:
    """Gives a worker no new requests, and unregisters it when the running ones have ended. 404 when it is unknown."""
    return drain_at(router, _endpoint(parameters_of(request)).url)


def drain_at(router: ClusterView, url: str) -> Response:
    running = sum(worker.load for worker in router.drain_worker(url))
    fate = "leaves when its running requests have ended" if running else "had nothing to do and left"
    return Response.json({"message": f"Worker {url} {fate}.", "running": running})


async def change_role(router: ClusterView, request: Request) -> Response:
    return await switch_role(router, parameters_of(request))


async def broadcast(router: ClusterView, request: Request) -> Response:
    """Sends the request to every worker; 200 when all succeed, with each worker's status (0: no answer) and error, and
    what the broadcast combines from the answers of those that succeeded.

    The status is 4xx where all that failed refused the request by a 4xx, else 502.
    """
    _, kind = broadcasts()[request.path]
    seconds = (router.config.http.request_timeout_secs or _FOREVER) if kind.slow else _BROADCAST_SECONDS
    answers = await ask_all(router, servers(router), request, seconds)
    if kind.renames:
        await asyncio.gather(*(ask_models(router.dispatcher, worker, _REPORT_SECONDS) for worker in router.registry))
    more = {} if kind.combine is None else kind.combine({
        worker.endpoint.url: answer.json_object() for worker, answer in answers.items() if answer.ok})
    return combined(answers, **more)


async def engine_metrics(router: ClusterView, request: Request) -> Response:
    """Merges the metrics of all servers into one page; 502 when none answers."""
    answers = await ask_all(router, servers(router), get("/metrics"), _REPORT_SECONDS)
    pages = {worker.endpoint.url: answer.body for worker, answer in answers.items() if answer.ok}
    return Response(200 if pages or not answers else 502, merge(pages), "text/plain; version=0.0.4; charset=utf-8")


async def loads(router: ClusterView, request: Request) -> Response:
    """Lists each worker's load: ``load`` as the router counts it, ``report`` by the worker itself (null: no answer)."""
    answers = await ask_all(router, servers(router), get("/get_load"), _REPORT_SECONDS)
    reports = {worker.endpoint.url: answer.json() for worker, answer in answers.items()}
    return Response.json({"workers": [
        {"worker": worker.url, "role": worker.role, "load": worker.load,
         "report": report_of(worker, reports.get(worker.endpoint.url))} for worker in router.registry]})


def parameters_of(request: Request) -> dict[str, Any]:
    """Returns the query's parameters, overridden by those of a JSON body; raises InvalidRequest."""
    query = parse_qs(request.query.decode("latin-1"))
    parameters: dict[str, Any] = {name: values[-1] for name, values in query.items()}
    if request.body:
        try:
            body = msgspec.json.decode(request.body)
        except UNREADABLE:
            body = None
        if not isinstance(body, dict):
            raise InvalidRequest("The request body must be a JSON object.")
        parameters.update(body)
    return parameters


def _endpoint(parameters: dict[str, Any]) -> Endpoint:
    url = parameters.get("url")
    if not isinstance(url, str):
        raise InvalidRequest("Name the worker: ?url=http://HOST:PORT.", param="url")
    try:
        return Endpoint.parse(server_url(url))
    except ValueError as error:
        raise InvalidRequest(str(error), param="url") from None


def worker_from(parameters: dict[str, Any], *, pairs: bool) -> Worker:
    """Builds a worker from an administrator's parameters; raises InvalidRequest."""
    role = parameters.get("role", parameters.get("worker_type"))  # the latter in sglang-router's REST form
    allowed = roles_of(pairs=pairs)
    if role is not None and role not in allowed:
        raise InvalidRequest(f"role must be {' or '.join(allowed)} on this router, not {role!r}.", param="role")
    port: Any = "ask"
    if "bootstrap_port" in parameters:
        try:
            port = parse_bootstrap_port(str(parameters["bootstrap_port"]))
        except ValueError as error:
            raise InvalidRequest(str(error), param="bootstrap_port") from None
    return Worker(_endpoint(parameters), role or REGULAR, bootstrap_port=port, asks_role=pairs and role is None,
                  api_key=key_from(parameters), model_id=_model(parameters), metadata=metadata_from(parameters),
                  always_healthy=_boolean(parameters, "disable_health_check"))


def metadata_from(parameters: dict[str, Any], before: WorkerMetadata | None = None) -> WorkerMetadata:
    """Returns a worker's metadata, changed by parameters; raises InvalidRequest."""
    given = {name: parameters[name] for name in WorkerMetadata.__struct_fields__ if parameters.get(name) is not None}
    before = before or WorkerMetadata()
    if isinstance(given.get("labels"), dict):
        given["labels"] = {**before.labels, **given["labels"]}
    try:
        return msgspec.convert({**msgspec.to_builtins(before), **given}, WorkerMetadata, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"priority is an integer, cost a number, labels are strings by name: {error}.") from None


def _model(parameters: dict[str, Any]) -> str | None:
    name = parameters.get("model_id")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest("model_id must be a string.", param="model_id")
    return name or None


def _boolean(parameters: dict[str, Any], name: str) -> bool:
    value = str(parameters.get(name, "false")).lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} is true or false, not {value!r}.", param=name)
    return value in ("true", "1")


def key_from(parameters: dict[str, Any]) -> str | None:
    key = parameters.get("api_key")
    if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
        raise InvalidRequest("api_key must be a printable string.", param="api_key")
    return key or None


_ADMIN_ROUTES: dict[bytes, tuple[tuple[bytes, ...], Handler]] = {
    b"/": ((b"GET",), root),
    b"/health": ((b"GET",), liveness),
    b"/liveness": ((b"GET",), liveness),
    b"/readiness": ((b"GET",), readiness),
    b"/ping": ((b"GET",), readiness),
    b"/metrics": ((b"GET",), metrics),
    b"/engine_metrics": ((b"GET",), engine_metrics),
    b"/dashboard": ((b"GET",), dashboard.page),
    b"/dashboard/data": ((b"GET",), dashboard.data),
    b"/list_workers": ((b"GET",), list_workers),
    b"/add_worker": ((b"POST",), add_worker),
    b"/remove_worker": ((b"POST",), remove_worker),
    b"/drain_worker": ((b"POST",), drain_worker),
    b"/switch_role": ((b"POST",), change_role),
    b"/pd_role_switch": ((b"POST",), change_role),
    b"/get_load": ((b"GET",), loads),
    b"/get_loads": ((b"GET",), loads),
    b"/v1/loads": ((b"GET",), loads),
}


@functools.cache
def admin_routes() -> dict[bytes, tuple[tuple[bytes, ...], Handler]]:
    """Methods and handler of the router's own paths; raises ConfigError for a command's plug-in that does not load or
    takes a path of the router."""
    refuse_taken_paths(path.decode() for path in broadcasts().keys() & {*_ADMIN_ROUTES, *RELAYED})
    return _ADMIN_ROUTES | {path: (methods, HANDLERS.get(path, broadcast))
                            for path, (methods, _) in broadcasts().items()}


OPEN_PATHS = frozenset((b"/", b"/health", b"/liveness", b"/readiness", b"/ping", b"/metrics", b"/dashboard"))
"""Paths that need no API key: probes and scrapers have none, and the dashboard's page asks for one."""
