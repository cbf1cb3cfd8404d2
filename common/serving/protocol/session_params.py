"""``session_params`` of requests."""

from __future__ import annotations

import msgspec

from ...api.wire import Int32


class SessionParams(msgspec.Struct):
    """``rid``: the request to continue, None begins anew. ``offset``: the number of its tokens that stay, -1 for all.
    ``replace``: requests that continued it before (without ``rid``: all requests) are dropped.
    ``drop_previous_output``: only its prompt stays."""

    id: str
    rid: str | None = None
    offset: Int32 | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None
