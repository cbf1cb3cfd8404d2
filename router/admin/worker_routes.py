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
from ..workers.registry import Worker
from ..workers.roles import WORKER_ROLES
from .endpoints import drain_at, key_from, metadata_from, parameters_of, register, remove_at, worker_from

WORKERS = b"/workers"
_FIXED = ("disable_health_check", "health_check_timeout_secs", "health_check_interval_secs", "health_success_threshold",
          "health_failure_threshold")
"""Fields of sglang-router's update that the router does not take for one worker."""


def changes_workers(request: Request) -> bool:
    """Returns True if a request under ``/workers`` changes the membership, which may need an admin key."""
    return request.path.startswith(WORKERS) and request.method not in (b"GET", b"HEAD")


def serve_workers(router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
    """Answers a request under ``/workers``; raises NotFound, MethodNotAllowed and what the handlers raise.

    Changes answer 202, as sglang-router's, which makes them later; here they are made before the answer.
    """
    name = request.path[len(WORKERS):].strip(b"/")
    if not name:
        check_method(request, (b"GET", b"HEAD", b"POST"))
        return _create(router, request) if request.method == b"POST" else _listed(router)
    if name.endswith(b"/drain"):
        check_method(request, (b"POST",))
        return drain_at(router, _find(router, name[:-len(b"/drain")]).endpoint.url)
    check_method(request, (b"GET", b"HEAD", b"PUT", b"DELETE"))
    worker = _find(router, name)
    if request.method == b"DELETE":
        remove_at(router, request, worker.endpoint.url)
        return _accepted(worker, "Worker removed")
    return _update(router, request, worker) if request.method == b"PUT" else Response.json(_shown(worker))


async def _create(router: ClusterView, request: Request) -> Response:
    """Registers a worker. One that is registered already stays as it is: a controller may ask twice."""
    worker = worker_from(parameters_of(request), pairs=router.config.workers.pd_disaggregation)
    message = "Worker added"
    try:
        await register(router, worker)
    except Conflict:
        worker, message = router.registry.workers_at(worker.endpoint.url)[0], "Worker is registered already"
    location = f"/workers/{worker.id}"
    return _accepted(worker, message, headers=(("location", location),), location=location)


def _update(router: ClusterView, request: Request, worker: Worker) -> Response:
    parameters = parameters_of(request)
    if fixed := [name for name in _FIXED if parameters.get(name) is not None]:
        raise InvalidRequest(f"{fixed[0]} cannot be changed for one worker; the router's flags set it for all.",
                             param=fixed[0])
    router.update_worker(worker.endpoint.url, metadata_from(parameters, worker.metadata), key_from(parameters))
    return _accepted(worker, "Worker updated")


def _accepted(worker: Worker, message: str, headers: tuple[tuple[str, str], ...] = (), **more: str) -> Response:
    body = {"status": "accepted", "worker_id": str(worker.id), "url": worker.endpoint.url, "message": message, **more}
    return Response(202, msgspec.json.encode(body), headers=headers)


def _listed(router: ClusterView) -> Response:
    workers = [_shown(worker) for worker in router.registry]
    counts = {f"{role}_count": sum(worker["role"] == role for worker in workers) for role in WORKER_ROLES}
    return Response.json({"workers": workers, "total": len(workers), "stats": counts})


def _shown(worker: Worker) -> dict[str, Any]:
    """Returns a worker as ``/list_workers`` shows it, and by sglang-router's names for the same."""
    shown, metadata = worker.describe(), worker.metadata
    return {**shown, "worker_type": worker.role, "is_healthy": shown["healthy"],
            "model_id": next(iter(worker.model_ids), "unknown"), "connection_mode": "HTTP",
            "priority": metadata.priority, "cost": metadata.cost, "metadata": metadata.labels,
            "disable_health_check": worker.always_healthy}


def _find(router: ClusterView, name: bytes) -> Worker:
    """Returns the worker of an id or URL; raises NotFound."""
    text = unquote(name.decode("latin-1"))
    for worker in router.registry:
        if text in (str(worker.id), worker.url):
            return worker
    try:
        return router.registry.workers_at(Endpoint.parse(server_url(text)).url)[0]
    except ValueError:
        raise NotFound(f"There is no worker {text}.") from None
