"""Session affinity: requests that only one worker can answer, because it stores what they refer to.

The worker is found by a consistent choice, not by a table: it is the one of its role whose URL and the request's
affinity key have the highest hash (rendezvous hashing). So any router finds it, also after its own restart, and a
worker that joins or leaves moves only the keys that it gets or had.

- Files and batches have one key, as a batch names its files and a list has them all: one worker stores them, if
  possible one that reports that it stores files (``file_storage_path`` of ``/get_server_info``).
- A session's key is its id. If ``/open_session`` brings none, the router adds one.

While the worker is not available, requests for what it stores get 503 with Retry-After: another worker does not have
it. Once the worker is removed or drains, another one is chosen.
"""

from __future__ import annotations

import uuid
from hashlib import blake2b
from typing import Any

import msgspec

from ...common.api.errors import WorkerUnavailable
from ...common.api.unreadable import UNREADABLE
from ..net.request import Group
from ..workers.registry import Registry, Role, Worker

FILES_KEY = b"files"
STORE_PATHS = (b"/v1/files", b"/v1/batches", b"/v1/uploads")
_SESSION_PARAMS = b'"session_params"'


class _Params(msgspec.Struct):
    id: str | None = None


class _WithParams(msgspec.Struct):
    session_params: _Params | None = None


class _Session(msgspec.Struct):
    session_id: str | None = None


_decode_params = msgspec.json.Decoder(_WithParams).decode
_decode_session = msgspec.json.Decoder(_Session).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def affinity_key(path: bytes, body: bytes) -> bytes | None:
    """The key of what a request refers to and one worker stores; None if any worker can answer."""
    if path.startswith(STORE_PATHS):
        return FILES_KEY
    if path in (b"/open_session", b"/close_session"):
        session = _read(_decode_session, body)
        name = session.session_id if session is not None else None
    elif _SESSION_PARAMS in body:
        found = _read(_decode_params, body)
        name = found.session_params.id if found is not None and found.session_params is not None else None
    else:
        return None
    return b"session " + name.encode() if name else None


def _read(decode: Any, body: bytes) -> Any:
    try:
        return decode(body)
    except UNREADABLE:
        return None  # The worker says what is wrong with it.


def with_session_id(registry: Registry, role: Role, body: bytes, group: Group = None) -> bytes:
    """The body of an ``/open_session`` with a session id, chosen so that its worker is available."""
    fields = _read(_decode_fields, body)
    if fields is None or affinity_key(b"/open_session", body) is not None:
        return body
    for _ in range(64):
        name = uuid.uuid4().hex
        if affine_worker(registry, role, b"session " + name.encode(), group) in registry.available(role):
            break
    return msgspec.json.encode({**fields, "session_id": name})


def affine_worker(registry: Registry, role: Role, key: bytes, group: Group = None) -> Worker | None:
    """The worker of the group that stores what ``key`` names, available or not; None if there is no worker."""
    workers = [worker for worker in registry
               if worker.role == role and not worker.draining and registry.models.serves(worker, group)]
    if key == FILES_KEY:
        workers = [worker for worker in workers if worker.keeps_files] or workers
    return max(workers, key=lambda worker: blake2b(worker.url.encode() + b" " + key).digest(), default=None)


def affine_worker_unavailable() -> WorkerUnavailable:
    """The error while the only worker that can answer is not available."""
    return WorkerUnavailable("The worker that keeps this is not available now.", retry_after=1.0)
