"""Fixtures of the front's tests: a checkpoint without weights, and a server over it with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from baton.tests.helpers.fake_engine import make_checkpoint
from baton.tests.helpers.serving import Server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log", "--model-path", str(checkpoint), "--api-key", "secret",
                    "--tool-call-parser", "hermes")
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()


@pytest.fixture
def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)


@pytest.fixture
async def http(server: Server):
    async with aiohttp.ClientSession(server.url, headers={"Authorization": "Bearer secret"}) as session:
        yield session
