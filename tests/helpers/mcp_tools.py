"""An MCP server with tools for tests: run as a script with a name, a port and a transport."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from baton.tests.helpers.ports import free_port


def main(name: str, port: int, transport: str) -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer(name, log_level="ERROR")
    kept: list[int] = []

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        kept.append(a + b)
        return a + b

    @server.tool()
    def fail(why: str) -> str:
        """Fails."""
        raise ValueError(why)

    @server.tool()
    def capital(country: str) -> str:
        """Says the capital of a country."""
        return {"France": "Paris"}.get(country, "nowhere")

    server.run(transport, port=port)  # type: ignore[call-overload]


@contextmanager
def mcp_server(name: str, transport: str = "streamable-http") -> Iterator[str]:
    """A server in a process of its own; its address."""
    port = free_port()
    process = subprocess.Popen([sys.executable, __file__, name, str(port), transport])
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "the MCP server does not start"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
