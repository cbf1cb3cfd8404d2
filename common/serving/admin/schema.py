"""Request bodies of the administrative endpoints."""

from __future__ import annotations

from typing import Annotated

import msgspec


class PrefillAddress(msgspec.Struct):
    bootstrap_host: str
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class AbortRequest(msgspec.Struct):
    rid: str | None = None
    abort_all: bool | None = None
