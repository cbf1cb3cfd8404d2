"""The demo's tool: Python that a model wrote, in a container without network, privileges or a disk."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from ...api.errors import ConfigError
from .base import ServerTool, ToolResult, ToolSession, cut

LABEL = "python"
IMAGE = "python:3.11-slim"
_RUN_SECONDS = 30.0
_MAX_PRINTED_BYTES = 2**20
_OPTIONS = ("--rm", "--interactive", "--network", "none", "--memory", "512m", "--memory-swap", "512m", "--cpus", "1",
            "--pids-limit", "64", "--read-only", "--tmpfs", "/tmp:size=64m", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges", "--user", "65534:65534")
_TOOL = ServerTool(
    LABEL, "python", "Runs a Python program without network access, and returns what it prints. Nothing is kept "
    "between calls: print what you want to see.",
    {"type": "object", "properties": {"code": {"type": "string", "description": "the program"}}, "required": ["code"]})


class DockerPython:
    """Runs each program in a container of its own."""

    label = LABEL
    tools = (_TOOL,)

    def __init__(self, docker: str):
        self._docker = docker

    @classmethod
    async def start(cls) -> DockerPython:
        """Raises ConfigError where programs could not run, or not safely."""
        docker = shutil.which("docker")
        if docker is None:
            raise ConfigError("--tool-server demo runs what models write in docker containers, and this host has no "
                              "docker: install it, or give MCP servers as host:port.")
        process = await asyncio.create_subprocess_exec(docker, "image", "inspect", IMAGE, stdin=DEVNULL, stdout=DEVNULL,
                                                       stderr=PIPE)
        _, problem = await process.communicate()
        if process.returncode:
            said = (problem.decode(errors="replace").strip() or "it failed").splitlines()[-1].rstrip(".")
            raise ConfigError(f"--tool-server demo cannot use docker ({said}): start docker, and get the image by "
                              f"docker pull {IMAGE}.")
        return cls(docker)

    def session(self) -> AbstractAsyncContextManager[ToolSession]:
        return self._session()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[ToolSession]:
        yield self

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if not isinstance(code, str):
            return ToolResult("The argument code is missing; it is the program, a string.", is_error=True)
        container = f"baton-python-{uuid.uuid4().hex}"
        process = await asyncio.create_subprocess_exec(
            self._docker, "run", "--name", container, *_OPTIONS, IMAGE, "python", "-I", "-",
            stdin=PIPE, stdout=PIPE, stderr=STDOUT)
        try:
            printed = await asyncio.wait_for(_run(process, code.encode()), _RUN_SECONDS)
        except asyncio.TimeoutError:
            return ToolResult(f"The program was ended after {_RUN_SECONDS:g} s.", is_error=True)
        finally:
            if process.returncode is None:
                await self._kill(container, process)
        return ToolResult(cut(printed.decode(errors="replace")), is_error=process.returncode != 0)

    async def _kill(self, container: str, process: asyncio.subprocess.Process) -> None:
        """Ends the container: that of its client alone would leave it running."""
        killer = await asyncio.create_subprocess_exec(self._docker, "kill", container, stdin=DEVNULL, stdout=DEVNULL,
                                                      stderr=DEVNULL)
        await killer.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdout is not None
        while await process.stdout.read(2**16):
            pass
        await process.wait()


async def _run(process: asyncio.subprocess.Process, code: bytes) -> bytes:
    """What the program prints, up to a limit; one that prints more is left running, for its caller to end."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(code)
        await process.stdin.drain()
    process.stdin.close()
    printed = b""
    while len(printed) < _MAX_PRINTED_BYTES:
        data = await process.stdout.read(2**16)
        if not data:
            await process.wait()
            break
        printed += data
    return printed
