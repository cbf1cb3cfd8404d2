"""Classification of requests for authorization: the paths and bodies that need the admin key (``access.Keys``)."""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from ...common.api.errors import InvalidRequest
from ...common.api.unreadable import UNREADABLE
from ..net.request import Request
from ..routes import PREFIXES, changing_paths
from .worker_routes import changes_workers

_CHANGING = frozenset((b"/add_worker", b"/remove_worker", b"/drain_worker", b"/switch_role",
                       b"/pd_role_switch"))
_SEPARATOR = re.compile(rb"[/\\]")


class _Abort(msgspec.Struct):
    abort_all: Any = None


_decode_abort = msgspec.json.Decoder(_Abort).decode


def check_path(path: bytes) -> None:
    """Raises InvalidRequest for a path that a worker could resolve differently than the router."""
    if any(part in (b".", b"..") for part in _SEPARATOR.split(unquote_to_bytes(path))):
        raise InvalidRequest("A part of the path is . or ..: give the resolved path.")


def needs_admin(request: Request) -> bool:
    """True if a request changes workers, or adds or removes some. A client may abort requests whose ids it knows."""
    path = request.path
    if path == b"/abort_request":
        try:
            return bool(_decode_abort(request.body).abort_all)
        except UNREADABLE:
            return False  # The workers say what is wrong with it.
    if path in _CHANGING or path in changing_paths() or changes_workers(request):
        return True
    return path.startswith(PREFIXES) and (
        unquote_to_bytes(path).rstrip(b"/").rpartition(b"/")[2] in _changing_names())


@functools.cache
def _changing_names() -> frozenset[bytes]:
    """The last parts of paths under ``PREFIXES`` that change the worker; all other paths there need no admin key."""
    return frozenset((*(path.rpartition(b"/")[2] for path in _CHANGING | changing_paths()),
                      b"sleep", b"wake_up", b"collective_rpc", b"scale_elastic_ep"))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
