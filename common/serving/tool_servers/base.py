"""Tools that the server runs for a model, within ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol


class ServerTool(NamedTuple):
    """One tool: ``server`` is the label of what runs it, ``parameters`` a JSON schema."""

    server: str
    name: str
    description: str | None
    parameters: dict[str, Any]


class ToolResult(NamedTuple):
    """What a tool answered; an error is shown to the model, too."""

    text: str
    is_error: bool = False


class ToolSession(Protocol):
    """One response's use of a tool server."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs a tool. What goes wrong is a result."""


class ToolServer(Protocol):
    """Something that runs tools."""

    @property
    def label(self) -> str: ...

    @property
    def tools(self) -> Sequence[ServerTool]: ...

    def session(self) -> AbstractAsyncContextManager[ToolSession]:
        """A session for one response, which is used and closed in the task that opened it."""


ToolServers = Mapping[str, ToolServer]
"""Tool servers by their labels."""

_MAX_RESULT_CHARS = 100_000


def cut(text: str) -> str:
    """A tool's answer, cut where it is longer than any model should read."""
    if len(text) <= _MAX_RESULT_CHARS:
        return text
    return f"{text[:_MAX_RESULT_CHARS]}\n[cut: {len(text)} characters]"
