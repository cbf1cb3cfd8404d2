"""Request bodies of ``/open_session`` and ``/close_session``."""

from __future__ import annotations

import msgspec

from ...api.wire import Int64


class OpenSessionRequest(msgspec.Struct):
    capacity_of_str_len: Int64
    session_id: str | None = None


class CloseSessionRequest(msgspec.Struct):
    session_id: str
