"""The role of a server, and that of each of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from contextvars import ContextVar
from typing import Any

from ...config.roles import ROLES, Role
from ...config.server import ServerConfig

REQUEST_ROLE: ContextVar[str | None] = ContextVar("request role", default=None)


class ServedRole:
    """The role that a server has now; ``config`` has that of its start.

    Use as an asynchronous context manager: inside, the bootstrap server of a server whose role may change runs while
    its role sends KV caches, and until ``stop_bootstrap`` is called afterwards.
    """

    def __init__(self, config: ServerConfig):
        self._config = config
        self.name = config.mode
        self.num_switches = 0
        self._bootstrap = contextlib.AsyncExitStack()
        self._serves_bootstrap = False
        self.closing: asyncio.Task[None] | None = None
        """Closes the bootstrap port later."""

    @property
    def switchable(self) -> bool:
        return self._config.disaggregation.enable_pd_role_switch

    @property
    def facts(self) -> Role:
        return ROLES.get(self.name)

    @property
    def of_request(self) -> Role:
        """The role in which the current request is served."""
        asked = REQUEST_ROLE.get()
        return self.facts if asked is None or not self.switchable else ROLES.get(asked)

    def set(self, name: str) -> None:
        self.name = name
        self.num_switches += 1

    async def __aenter__(self) -> ServedRole:
        if self.switchable and self.facts.sends_kv:
            await self.start_bootstrap()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.closing is not None:
            self.closing.cancel()
        await self.stop_bootstrap()

    async def start_bootstrap(self) -> None:
        """Raises ConfigError where the port is occupied."""
        if not self._serves_bootstrap:
            launcher: Any = importlib.import_module(next(
                facts.launcher for facts in map(ROLES.get, ROLES.names) if facts.sends_kv))
            await self._bootstrap.enter_async_context(launcher.bootstrap_server(self._config))
            self._serves_bootstrap = True

    async def stop_bootstrap(self) -> None:
        self._serves_bootstrap = False
        await self._bootstrap.aclose()  # it may be used again
