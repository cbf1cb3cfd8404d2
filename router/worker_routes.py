"""The workers as a resource: ``/workers``, ``/workers/{id or percent-encoded URL}`` and its ``/drain``."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from ..common.api.errors import NotFound
from .admin import add_worker, drained, list_workers, removed
from .endpoint import Endpoint
from .http_server import Request
from .ranks import server_url
from .registry import Worker
from .wire import Response, check_method

if TYPE_CHECKING:
    from .app import Router

WORKERS = b"/workers"


def changes_workers(request: Request) -> bool:
    """Whether a request under ``/workers`` changes the membership; with admin keys, only those open it."""
    return request.path.startswith(WORKERS) and request.method not in (b"GET", b"HEAD")


def serve_workers(router: Router, request: Request) -> Response:
    """Answer a request under ``/workers``; raises NotFound, MethodNotAllowed and what the verbs raise."""
    name = request.path[len(WORKERS):].strip(b"/")
    if not name:
        check_method(request, (b"GET", b"HEAD", b"POST"))
        return _created(add_worker(router, request)) if request.method == b"POST" else list_workers(router, request)
    if name.endswith(b"/drain"):
        check_method(request, (b"POST",))
        return drained(router, _find(router, name[:-len(b"/drain")]).endpoint.url)
    check_method(request, (b"GET", b"HEAD", b"DELETE"))
    worker = _find(router, name)
    if request.method == b"DELETE":
        return removed(router, request, worker.endpoint.url)
    return Response.json(worker.describe())


def _created(added: Response) -> Response:
    worker = msgspec.json.decode(added.body)["worker"]
    return Response(201, msgspec.json.encode(worker), headers=(("location", f"/workers/{worker['id']}"),))


def _find(router: Router, name: bytes) -> Worker:
    """Raises NotFound."""
    text = unquote(name.decode("latin-1"))
    for worker in router.registry:
        if text in (str(worker.id), worker.url):
            return worker
    try:
        return router.registry.at(Endpoint.parse(server_url(text)).url)[0]
    except ValueError:
        raise NotFound(f"There is no worker {text}.") from None
