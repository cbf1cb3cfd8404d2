"""Servers that several test files share: starting one takes seconds."""

import pytest

from baton.tests.helpers.harness import Cluster, Server
from baton.tests.helpers.ports import free_port

EXTRAS = ("--enable-custom-logit-processor", "--enable-return-hidden-states")
"""What requests may ask for only where servers allow it."""


@pytest.fixture(scope="session")
def unified(tmp_path_factory):
    """A unified server of the shipped chat model."""
    folder = tmp_path_factory.mktemp("unified")
    argv = ["--model-path", "tinychat", "--device", "cpu", "--log-level", "warning",
            "--file-storage-path", str(folder / "kept"), *EXTRAS]
    server = Server("baton.launch", ["server", *argv], free_port(), folder / "server.log").start()
    try:
        yield server.wait_ready()
        assert server.stop() == 0, repr(server)
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="session")
def relay(tmp_path_factory):
    """Router, one prefill and one decode server."""
    with Cluster(tmp_path_factory.mktemp("relay"), flags=EXTRAS) as cluster:
        yield cluster
