"""Files and batches when workers serve several models: each model's are stored by a worker of its own.

A file belongs to the model that its first line names. The router asks the storing workers for a file or batch, so that
any router finds it, also after its own restart; lists are merged.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from ...common.api.unreadable import UNREADABLE
from ..net.request import Request
from ..net.responses import Response
from ..workers.ask import WorkerResponse, ask, get
from ..workers.registry import Role, Worker
from .dispatcher import Dispatcher
from .session_affinity import FILES_KEY, affine_worker, affine_worker_unavailable

_RESOURCES = (b"/v1/files", b"/v1/batches")
_ASK_SECONDS = 10.0
_SEARCHED_BYTES = 64 * 1024
"""Bytes of an upload that are searched for a model's name: a form's fields, and the first line of the file."""
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


class _Batch(msgspec.Struct):
    input_file_id: str | None = None


_decode_batch = msgspec.json.Decoder(_Batch).decode
_decode_name = msgspec.json.Decoder(str).decode


def model_of_upload(body: bytes) -> str:
    """The model that the first line of an uploaded file names; "" if it names none."""
    found = _MODEL.search(body, 0, _SEARCHED_BYTES)
    try:
        return _decode_name(found[1]) if found is not None else ""
    except UNREADABLE:
        return ""


def is_upload(request: Request) -> bool:
    return request.method == b"POST" and request.path == b"/v1/files"


def is_list(request: Request) -> bool:
    return request.method in (b"GET", b"HEAD") and request.path.rstrip(b"/") in _RESOURCES


def resource_path(request: Request) -> str:
    """The path of the file or batch that a request refers to; "" if it refers to none."""
    parts = request.path.decode("latin-1").split("/")
    if request.method == b"POST" and request.path == b"/v1/batches":
        try:
            name = _decode_batch(request.body).input_file_id
        except UNREADABLE:
            return ""
        return f"/v1/files/{name}" if name and re.fullmatch(r"[\w.-]+", name) else ""
    in_resource = request.path.startswith(tuple(resource + b"/" for resource in _RESOURCES))
    return "/".join(parts[:4]) if in_resource and parts[3] else ""


def refers_to_stored(request: Request) -> bool:
    """True if a request refers to files or batches that are stored already."""
    return is_list(request) or bool(resource_path(request))


async def find_worker(dispatcher: Dispatcher, role: Role, request: Request, path: str) -> Worker | None:
    """The worker that has something at ``path``, or None; raises WorkerUnavailable if one that may have it is not
    available."""
    workers = _storing_workers(dispatcher, role)
    available = [worker for worker in workers if worker in dispatcher.registry.available(role)]
    for worker, response in zip(available, await ask_all(dispatcher, available, request, path)):
        if response.ok:
            return worker
    if len(available) < len(workers):
        raise affine_worker_unavailable()
    return None


async def merged_list(dispatcher: Dispatcher, role: Role, request: Request) -> Response:
    """The lists of all storing workers in one, newest first; raises WorkerUnavailable if one does not answer."""
    workers = _storing_workers(dispatcher, role)
    responses = await ask_all(dispatcher, workers, request, request.target.decode("latin-1"))
    if any(not response.status for response in responses):
        raise affine_worker_unavailable()
    if refused := [response for response in responses if not response.ok]:
        return Response(refused[0].status, refused[0].body)
    pages = [response.json_object() for response in responses]
    items: list[Any] = [item for page in pages for item in page.get("data") or ()]
    items.sort(key=lambda item: -(item.get("created_at") or 0) if isinstance(item, dict) else 0)
    page = {**pages[0], "data": items, "has_more": any(page.get("has_more") for page in pages)}
    if "first_id" in page:
        ids = [item.get("id") for item in items if isinstance(item, dict)] or [None]
        page |= {"first_id": ids[0], "last_id": ids[-1]}
    return Response.json(page)


def _storing_workers(dispatcher: Dispatcher, role: Role) -> list[Worker]:
    registry = dispatcher.registry
    found = [affine_worker(registry, role, FILES_KEY, group) for group in registry.models.groups]
    return [worker for worker in dict.fromkeys(found) if worker is not None]


async def ask_all(dispatcher: Dispatcher, workers: list[Worker], request: Request,
                  target: str) -> list[WorkerResponse]:
    """The responses of all ``workers`` to a GET of ``target`` by the client of ``request``."""
    query = get(target)
    query.authorization_line = request.authorization_line
    return await asyncio.gather(*(ask(dispatcher, worker, query, _ASK_SECONDS) for worker in workers))
