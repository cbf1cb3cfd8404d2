"""The workers as a resource: ``/workers``, ``/workers/{id or percent-encoded URL}`` and its ``/drain``."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec

from ..common.api.errors import NotFound
from .admin import add_worker, drained, removed
from .cluster import Cluster
from .endpoint import Endpoint
from .ranks import server_url
from .registry import ROLES, Worker
from .request import Request
from .wire import Response, check_method

WORKERS = b"/workers"


def changes_workers(request: Request) -> bool:
    """Whether a request under ``/workers`` changes the membership; with admin keys, only those open it."""
    return request.path.startswith(WORKERS) and request.method not in (b"GET", b"HEAD")


def serve_workers(router: Cluster, request: Request) -> Response:
    """Answer a request under ``/workers``; raises NotFound, MethodNotAllowed and what the verbs raise."""
    name = request.path[len(WORKERS):].strip(b"/")
    if not name:
        check_method(request, (b"GET", b"HEAD", b"POST"))
        return _created(router, add_worker(router, request)) if request.method == b"POST" else _listed(router)
    if name.endswith(b"/drain"):
        check_method(request, (b"POST",))
        return drained(router, _find(router, name[:-len(b"/drain")]).endpoint.url)
    check_method(request, (b"GET", b"HEAD", b"DELETE"))
    worker = _find(router, name)
    if request.method == b"DELETE":
        return removed(router, request, worker.endpoint.url)
    return Response.json(_shown(worker))


def _listed(router: Cluster) -> Response:
    workers = [_shown(worker) for worker in router.registry]
    counts = {f"{role}_count": sum(worker["role"] == role for worker in workers) for role in ROLES}
    return Response.json({"workers": workers, "total": len(workers), "stats": counts})


def _shown(worker: Worker) -> dict[str, Any]:
    """As ``/list_workers`` shows it, and by the names that sglang-router has for it here."""
    shown = worker.describe()
    return {**shown, "worker_type": worker.role, "is_healthy": shown["healthy"],
            "model_id": next(iter(worker.model_ids), "unknown"), "connection_mode": "HTTP"}


def _created(router: Cluster, added: Response) -> Response:
    worker = msgspec.json.decode(added.body)["worker"]
    place = f"/workers/{worker['id']}"
    body = {**_shown(router.registry.at(worker["url"])[0]), "worker_id": worker["id"], "location": place}
    return Response(201, msgspec.json.encode(body), headers=(("location", place),))


def _find(router: Cluster, name: bytes) -> Worker:
    """Raises NotFound."""
    text = unquote(name.decode("latin-1"))
    for worker in router.registry:
        if text in (str(worker.id), worker.url):
            return worker
    try:
        return router.registry.at(Endpoint.parse(server_url(text)).url)[0]
    except ValueError:
        raise NotFound(f"There is no worker {text}.") from None
