"""The tool servers that ``--tool-server`` names."""

from __future__ import annotations

from ...api.errors import ConfigError
from .base import ToolServer, ToolServers
from .docker_python import DockerPython
from .mcp_server import MCPServer


async def start_tool_servers(named: str | None) -> ToolServers:
    """Connects to all servers, by their labels; raises ConfigError for one that cannot be used."""
    servers: dict[str, ToolServer] = {}
    for address in (named or "").split(","):
        if not address.strip():
            continue
        server: ToolServer = (await DockerPython.start() if address.strip() == "demo"
                              else await MCPServer.connect(address.strip()))
        if server.label in servers:
            raise ConfigError(f"--tool-server {named}: two servers are called {server.label!r}; requests name them by "
                              "that.")
        servers[server.label] = server
    return servers
