"""Tools of MCP servers, over streamable HTTP or SSE."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from ...api.errors import ConfigError
from .base import ServerTool, ToolResult, ToolSession, cut

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger("baton.server")

_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 120.0


class MCPServer:
    """A server that answered when this one started; each response that calls its tools has a session of its own."""

    def __init__(self, url: str, label: str, tools: Sequence[ServerTool]):
        self.url = url
        self.label = label
        self.tools = tools

    @classmethod
    async def connect(cls, address: str) -> MCPServer:
        """Asks the server at ``address`` (host:port, or a URL) for its name and its tools; raises ConfigError."""
        try:
            import anyio
            import mcp  # noqa: F401  # whether it is there
        except ImportError:
            raise ConfigError("--tool-server needs the package mcp: pip install 'baton[tools]'.") from None
        problem: BaseException | None = None
        for url in _urls(address):
            try:
                with anyio.fail_after(_CONNECT_SECONDS):
                    async with _client(url) as client:
                        return await cls._learn(url, client)
            except Exception as error:  # a group of whatever its tasks raise
                problem = problem or _cause(error)
        raise ConfigError(f"--tool-server {address}: no MCP server answers there: "
                          f"{str(problem).strip() or type(problem).__name__}.")

    @classmethod
    async def _learn(cls, url: str, client: Client) -> MCPServer:
        about = client.server_info
        label = about.name if about is not None else url
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [ServerTool(label, tool.name, tool.description, dict(tool.input_schema)) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        log.info("tool server %s at %s: %s", label, url, ", ".join(tool.name for tool in tools) or "no tools")
        return cls(url, label, tools)

    def session(self) -> AbstractAsyncContextManager[ToolSession]:
        return _session(self.url)


@asynccontextmanager
async def _session(url: str) -> AsyncIterator[ToolSession]:
    async with _client(url) as client:
        yield _Session(client)


class _Session:
    def __init__(self, client: Client):
        self._client = client

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp import MCPError

        try:
            result = await self._client.call_tool(name, arguments, read_timeout_seconds=_CALL_SECONDS)
        except MCPError as error:
            return ToolResult(cut(str(error)), is_error=True)
        texts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        return ToolResult(cut("\n".join(texts)), bool(result.is_error))


def _client(url: str) -> Client:
    from mcp import Client
    from mcp.client.sse import sse_client

    return Client(sse_client(url) if url.rstrip("/").endswith("/sse") else url)


def _urls(address: str) -> list[str]:
    """Where an address's server may answer: the paths that MCP servers have by default."""
    if "://" in address:
        return [address]
    return [f"http://{address}/mcp", f"http://{address}/sse"]


def _cause(error: BaseException) -> BaseException:
    """The first error of a group."""
    while within := getattr(error, "exceptions", ()):
        error = within[0]
    return error
