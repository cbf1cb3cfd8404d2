"""Files and batches where workers serve several models: each model has a keeper of its own, which is looked for.

A file belongs to the model that its first line names. Who keeps a thing is asked of the keepers themselves, so that any
router finds it, also after its own restart; lists are put together.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from ...common.api.unreadable import UNREADABLE
from ..net.request import Request
from ..net.responses import Response
from ..workers.ask import Answer, ask, get
from ..workers.registry import Role, Worker
from .dispatcher import Dispatcher
from .session_affinity import FILES, away, keeper

_KINDS = (b"/v1/files", b"/v1/batches")
_ASK_SECONDS = 10.0
_HEAD = 64 * 1024
"""Bytes of an upload in which a model's name is looked for: a form's fields, and the first line of the file."""
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


class _Batch(msgspec.Struct):
    input_file_id: str | None = None


_batch = msgspec.json.Decoder(_Batch).decode
_name = msgspec.json.Decoder(str).decode


def model_of_upload(body: bytes) -> str:
    """The model that the first line of an uploaded file names; "" where none does."""
    found = _MODEL.search(body, 0, _HEAD)
    try:
        return _name(found[1]) if found is not None else ""
    except UNREADABLE:
        return ""


def is_upload(request: Request) -> bool:
    return request.method == b"POST" and request.path == b"/v1/files"


def is_list(request: Request) -> bool:
    return request.method in (b"GET", b"HEAD") and request.path.rstrip(b"/") in _KINDS


def described_at(request: Request) -> str:
    """Where the keeper of the thing that a request speaks of describes it; "" where it speaks of none."""
    parts = request.path.decode("latin-1").split("/")
    if request.method == b"POST" and request.path == b"/v1/batches":
        try:
            name = _batch(request.body).input_file_id
        except UNREADABLE:
            return ""
        return f"/v1/files/{name}" if name and re.fullmatch(r"[\w.-]+", name) else ""
    return "/".join(parts[:4]) if request.path.startswith(tuple(kind + b"/" for kind in _KINDS)) and parts[3] else ""


def is_known(request: Request) -> bool:
    """Whether a request speaks of what is kept already."""
    return is_list(request) or bool(described_at(request))


async def find(dispatcher: Dispatcher, role: Role, request: Request, path: str) -> Worker | None:
    """The keeper that describes something at ``path``, or None; raises WorkerUnavailable where one that may know it is
    away."""
    keepers = _keepers(dispatcher, role)
    present = [worker for worker in keepers if worker in dispatcher.registry.available(role)]
    for worker, answer in zip(present, await _ask_all(dispatcher, present, request, path)):
        if answer.ok:
            return worker
    if len(present) < len(keepers):
        raise away()
    return None


async def listed(dispatcher: Dispatcher, role: Role, request: Request) -> Response:
    """The lists of all keepers in one, the newest first; raises WorkerUnavailable while one of them is away."""
    keepers = _keepers(dispatcher, role)
    answers = await _ask_all(dispatcher, keepers, request, request.target.decode("latin-1"))
    if any(not answer.status for answer in answers):
        raise away()
    if refused := [answer for answer in answers if not answer.ok]:
        return Response(refused[0].status, refused[0].body)
    pages = [answer.json_object() for answer in answers]
    things: list[Any] = [thing for page in pages for thing in page.get("data") or ()]
    things.sort(key=lambda thing: -(thing.get("created_at") or 0) if isinstance(thing, dict) else 0)
    page = {**pages[0], "data": things, "has_more": any(page.get("has_more") for page in pages)}
    if "first_id" in page:
        ids = [thing.get("id") for thing in things if isinstance(thing, dict)] or [None]
        page |= {"first_id": ids[0], "last_id": ids[-1]}
    return Response.json(page)


def _keepers(dispatcher: Dispatcher, role: Role) -> list[Worker]:
    registry = dispatcher.registry
    found = [keeper(registry, role, FILES, group) for group in registry.models.groups]
    return [worker for worker in dict.fromkeys(found) if worker is not None]


async def _ask_all(dispatcher: Dispatcher, workers: list[Worker], request: Request, target: str) -> list[Answer]:
    question = get(target)
    question.authorization_line = request.authorization_line
    return await asyncio.gather(*(ask(dispatcher, worker, question, _ASK_SECONDS) for worker in workers))
