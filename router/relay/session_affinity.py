"""Requests that only one worker can answer, because it keeps what they speak of.

What is kept is found again by a consistent choice, not by a table: of the workers of the role, the one whose URL and
the thing's key hash highest (rendezvous hashing). So any router finds it, also after its own restart, and a worker that
joins or leaves moves only what falls to it.

- Files and batches have one key, as a batch names its files and lists name them all: one worker keeps them, of those
  that say that they keep files (``file_storage_path`` of ``/get_server_info``), where some do.
- A session's key is its id. Where ``/open_session`` brings none, the router gives it one.

While a worker that keeps things is away, so are they (503 with Retry-After): another one would not know them. They
are looked for elsewhere once it is removed or drains.
"""

from __future__ import annotations

import uuid
from hashlib import blake2b
from typing import Any

import msgspec

from ...common.api.errors import WorkerUnavailable
from ...common.api.unreadable import UNREADABLE
from ..workers.models import Group
from ..workers.registry import Registry, Role, Worker

FILES = b"files"
STORES = (b"/v1/files", b"/v1/batches", b"/v1/uploads")
_SESSION = b'"session_params"'


class _Params(msgspec.Struct):
    id: str | None = None


class _Named(msgspec.Struct):
    session_params: _Params | None = None


class _Session(msgspec.Struct):
    session_id: str | None = None


_named = msgspec.json.Decoder(_Named).decode
_session = msgspec.json.Decoder(_Session).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def key_of(path: bytes, body: bytes) -> bytes | None:
    """What a request speaks of that one worker keeps; None: any worker can answer."""
    if path.startswith(STORES):
        return FILES
    if path in (b"/open_session", b"/close_session"):
        found = _read(_session, body)
        name = found.session_id if found is not None else None
    elif _SESSION in body:
        named = _read(_named, body)
        name = named.session_params.id if named is not None and named.session_params is not None else None
    else:
        return None
    return b"session " + name.encode() if name else None


def _read(decode: Any, body: bytes) -> Any:
    try:
        return decode(body)
    except UNREADABLE:
        return None  # The worker says what is wrong with it.


def with_session_id(registry: Registry, role: Role, body: bytes, group: Group = None) -> bytes:
    """The body of an ``/open_session`` with a session's name, one that falls to a worker that is there."""
    fields = _read(_fields, body)
    if fields is None or key_of(b"/open_session", body) is not None:
        return body
    for _ in range(64):
        name = uuid.uuid4().hex
        if keeper(registry, role, b"session " + name.encode(), group) in registry.available(role):
            break
    return msgspec.json.encode({**fields, "session_id": name})


def keeper(registry: Registry, role: Role, key: bytes, group: Group = None) -> Worker | None:
    """The worker of the group that keeps what ``key`` names, whether it can be asked now or not; None where there is
    none."""
    workers = [worker for worker in registry
               if worker.role == role and not worker.draining and registry.models.serves(worker, group)]
    if key == FILES:
        workers = [worker for worker in workers if worker.keeps_files] or workers
    return max(workers, key=lambda worker: blake2b(worker.url.encode() + b" " + key).digest(), default=None)


def away() -> WorkerUnavailable:
    return WorkerUnavailable("The worker that keeps this is not available now.", retry_after=1.0)
