"""Server processes for tests, and what tests ask them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

from baton.tests.helpers.ports import free_port

SCRIPT = str(Path(__file__).parent / "fake_engine.py")


class Server:
    """A server process; all that it printed is in ``log``."""

    def __init__(self, log: Path, *flags: str, port: int | None = None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, SCRIPT, "--port", str(self.port), *flags], stderr=file)

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError:
            return 0, None

    def wait_ready(self) -> Server:
        self.wait(lambda: self.get("/health")[0] == 200)
        return self

    def wait(self, condition, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found]

    def engine(self) -> dict[str, Any]:
        return self.get("/get_server_info")[1]["internal_states"][0]

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(number)
        return self.process.wait(15)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def generate(http: aiohttp.ClientSession, **body: Any) -> tuple[int, Any]:
    async with http.post("/generate", json=body) as answer:
        return answer.status, await answer.json()


async def info(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/get_server_info") as answer:
        return (await answer.json())["internal_states"][0]


async def wait_running(http: aiohttp.ClientSession, number: int) -> float:
    began = time.monotonic()
    while (await info(http))["num_running"] != number:
        assert time.monotonic() - began < 5
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def assert_gone(pids: list[int], seconds: float = 2.0) -> None:
    """multiprocessing's resource tracker ends a moment after its parent."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
