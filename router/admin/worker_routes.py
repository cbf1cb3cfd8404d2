"""The workers as a resource: ``/workers``, ``/workers/{id or percent-encoded URL}`` and its ``/drain``."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any
from urllib.parse import unquote

import msgspec

from ...common.api.errors import Conflict, InvalidRequest, NotFound
from ..config.endpoint import Endpoint
from ..monitoring.cluster_view import ClusterView
from ..net.request import Request
from ..net.responses import Response, check_method
from ..workers.dp_ranks import server_url
from ..workers.registry import ROLES, Worker
from .endpoints import drained, join, key_from, metadata_from, parameters_of, removed, worker_from

WORKERS = b"/workers"
_FIXED = ("disable_health_check", "health_check_timeout_secs", "health_check_interval_secs", "health_success_threshold",
          "health_failure_threshold")
"""Fields of sglang-router's update that the router does not take for a worker alone."""


def changes_workers(request: Request) -> bool:
    """Whether a request under ``/workers`` changes the membership; with admin keys, only those open it."""
    return request.path.startswith(WORKERS) and request.method not in (b"GET", b"HEAD")


def serve_workers(router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
    """Answer a request under ``/workers``; raises NotFound, MethodNotAllowed and what the verbs raise.

    Changes answer 202, as sglang-router's, which makes them later; here they hold when they are answered.
    """
    name = request.path[len(WORKERS):].strip(b"/")
    if not name:
        check_method(request, (b"GET", b"HEAD", b"POST"))
        return _create(router, request) if request.method == b"POST" else _listed(router)
    if name.endswith(b"/drain"):
        check_method(request, (b"POST",))
        return drained(router, _find(router, name[:-len(b"/drain")]).endpoint.url)
    check_method(request, (b"GET", b"HEAD", b"PUT", b"DELETE"))
    worker = _find(router, name)
    if request.method == b"DELETE":
        removed(router, request, worker.endpoint.url)
        return _accepted(worker, "Worker removed")
    return _update(router, request, worker) if request.method == b"PUT" else Response.json(_shown(worker))


async def _create(router: ClusterView, request: Request) -> Response:
    """Register a worker. One that is there already stays as it is: a controller may ask twice."""
    worker = worker_from(parameters_of(request), pairs=router.config.workers.pd_disaggregation)
    message = "Worker added"
    try:
        await join(router, worker)
    except Conflict:
        worker, message = router.registry.workers_at(worker.endpoint.url)[0], "Worker is registered already"
    place = f"/workers/{worker.id}"
    return _accepted(worker, message, headers=(("location", place),), location=place)


def _update(router: ClusterView, request: Request, worker: Worker) -> Response:
    told = parameters_of(request)
    if fixed := [name for name in _FIXED if told.get(name) is not None]:
        raise InvalidRequest(f"{fixed[0]} cannot be changed for one worker; the router's flags set it for all.",
                             param=fixed[0])
    router.update_worker(worker.endpoint.url, metadata_from(told, worker.metadata), key_from(told))
    return _accepted(worker, "Worker updated")


def _accepted(worker: Worker, message: str, headers: tuple[tuple[str, str], ...] = (), **more: str) -> Response:
    told = {"status": "accepted", "worker_id": str(worker.id), "url": worker.endpoint.url, "message": message, **more}
    return Response(202, msgspec.json.encode(told), headers=headers)


def _listed(router: ClusterView) -> Response:
    workers = [_shown(worker) for worker in router.registry]
    counts = {f"{role}_count": sum(worker["role"] == role for worker in workers) for role in ROLES}
    return Response.json({"workers": workers, "total": len(workers), "stats": counts})


def _shown(worker: Worker) -> dict[str, Any]:
    """As ``/list_workers`` shows it, and by the names that sglang-router has for it here."""
    shown, noted = worker.describe(), worker.metadata
    return {**shown, "worker_type": worker.role, "is_healthy": shown["healthy"],
            "model_id": next(iter(worker.model_ids), "unknown"), "connection_mode": "HTTP",
            "priority": noted.priority, "cost": noted.cost, "metadata": noted.labels,
            "disable_health_check": worker.always_healthy}


def _find(router: ClusterView, name: bytes) -> Worker:
    """Raises NotFound."""
    text = unquote(name.decode("latin-1"))
    for worker in router.registry:
        if text in (str(worker.id), worker.url):
            return worker
    try:
        return router.registry.workers_at(Endpoint.parse(server_url(text)).url)[0]
    except ValueError:
        raise NotFound(f"There is no worker {text}.") from None
