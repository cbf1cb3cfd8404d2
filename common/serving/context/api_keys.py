"""API keys: a client's and an administrator's."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from aiohttp import web

from ...api.errors import Unauthorized


@dataclass(frozen=True)
class ApiKeys:
    """Keys as requests send them; None where none is required. An administrator's key opens everything."""

    client: bytes | None
    admin: bytes | None

    @classmethod
    def of(cls, client: str | None, admin: str | None) -> ApiKeys:
        """Without an administrator's key, that of clients opens everything."""
        first, second = (f"Bearer {key}".encode() if key else None for key in (client, admin))
        return cls(first, second or first)

    def check(self, request: web.Request, *, admin: bool) -> None:
        """Raises Unauthorized where the request's key does not open its route."""
        if (self.admin if admin else self.client) is None:
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not given:  # Anthropic's clients have a header of their own
            given = b"Bearer " + request.headers.get("x-api-key", "").encode("utf-8", "surrogateescape")
        opening = {self.admin} if admin else {self.client, self.admin}
        if not any(hmac.compare_digest(given, key) for key in opening if key is not None):
            whose = "administrator's key" if admin and self.admin != self.client else "API key"
            raise Unauthorized(f"The {whose} is missing or wrong; send it as 'Authorization: Bearer <key>'.")
