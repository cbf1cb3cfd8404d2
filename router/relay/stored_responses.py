"""Answers of ``/v1/responses`` that workers store, found by the worker that their ids name.

An id holds the tag of the server that stores it, which health checks learn. So any router finds it, also after its own
restart, and knows that an answer is lost once no worker has its tag. Only then, where a stream was continued on another
worker or the worker is no server of ours, all of them are asked.

A request that continues a stored answer gets the conversation's items from that worker, and is then like any other: any
worker or pair may serve it, and it may be retried and continued elsewhere.
"""

from __future__ import annotations

import re

import msgspec

from ...common.api.errors import InvalidRequest, NotFound, ServingError
from ...common.api.unreadable import UNREADABLE
from ...common.serving.responses.schema import SERVER_TOOLS
from ..net.request import Request
from ..net.responses import error_message
from ..workers.ask import ask, get
from ..workers.registry import Role, Worker
from .dispatcher import Dispatcher
from .session_affinity import affine_worker_unavailable
from .stored_objects import ask_all

PATH = b"/v1/responses"
_ID = re.compile(r"[\w-]{1,128}")
_TAG_START, _TAG_END = len("resp_"), len("resp_") + 12
_ASK_SECONDS = 10.0


class _Fields(msgspec.Struct):
    previous_response_id: str | None = None
    previous_items: msgspec.Raw = msgspec.Raw()
    tools: list[msgspec.Raw] | None = None


class _Tool(msgspec.Struct):
    type: str = ""


class _Items(msgspec.Struct):
    items: msgspec.Raw


class Refused(ServingError):
    """An error of the worker that stores an answer, with its status."""

    def __init__(self, status: int, message: str):
        super().__init__(message, code="response_not_usable")
        self.status = status
        self.type = "invalid_request_error" if status < 500 else "server_error"


_decode = msgspec.json.Decoder(_Fields).decode
_decode_tool = msgspec.json.Decoder(_Tool).decode
_decode_items = msgspec.json.Decoder(_Items).decode
_WORDS = (b'"previous_response_id"', b'"mcp"', b'"web_search', b'"code_interpreter"')


class Needs(msgspec.Struct):
    """What a request of ``/v1/responses`` needs besides a worker."""

    previous_id: str | None = None
    """The stored answer that it continues."""
    server_tools: bool = False
    """True if the worker that answers is to run tools, which a prefill worker knows nothing of."""


def needs_of(body: bytes) -> Needs:
    """Reads a request; one that cannot be read needs nothing, and its worker says what is wrong with it."""
    if not any(word in body for word in _WORDS):
        return Needs()
    try:
        fields = _decode(body)
        kinds = {_decode_tool(tool).type for tool in fields.tools or ()}
    except UNREADABLE:
        return Needs()
    given = bool(bytes(fields.previous_items))
    return Needs(None if given else fields.previous_response_id or None, not kinds.isdisjoint(SERVER_TOOLS))


def stored_id(request: Request) -> str:
    """The id in the path of a request for a stored answer; "" if it is for none."""
    if not request.path.startswith(PATH + b"/"):
        return ""
    return request.path[len(PATH) + 1:].split(b"/")[0].decode("latin-1")


async def find_worker(dispatcher: Dispatcher, role: Role, request: Request, name: str, param: str) -> Worker:
    """The worker that stores the answer ``name``.

    Raises NotFound if none does, and WorkerUnavailable while the one that does is not available.
    """
    if _ID.fullmatch(name):
        available = dispatcher.registry.available(role)
        tag = name[_TAG_START:_TAG_END]
        if named := [worker for worker in dispatcher.registry if worker.role == role and worker.response_tag == tag]:
            if (found := next((worker for worker in named if worker in available), None)) is None:
                raise affine_worker_unavailable()
            return found
        roots = list({id(worker.root): worker for worker in available}.values())
        for worker, answer in zip(roots, await ask_all(dispatcher, roots, request, f"/v1/responses/{name}")):
            if answer.ok:
                return worker
    raise NotFound(f"No worker stores the response {name[:80]!r}: it never was stored, it was deleted, it made room "
                   "for newer ones, or its server has left. Send the conversation as input items.", param=param,
                   code="response_not_found")


async def with_conversation(dispatcher: Dispatcher, worker: Worker, request: Request, name: str) -> bytes:
    """The body of a request with the items of the stored answer that it continues; raises ServingError."""
    query = get(f"/v1/responses/{name}/conversation")
    query.authorization_line = request.authorization_line
    answer = await ask(dispatcher, worker, query, _ASK_SECONDS)
    if not answer.status:
        raise affine_worker_unavailable()
    if not answer.ok:
        raise Refused(answer.status, error_message(answer.body))
    try:
        items = bytes(_decode_items(answer.body).items)
    except UNREADABLE:
        raise InvalidRequest(f"The worker of response {name!r} does not say what its conversation is.",
                             param="previous_response_id") from None
    start = bytes(request.body).index(b"{") + 1
    return b'%b"previous_items":%b,%b' % (request.body[:start], items, request.body[start:])
