"""An administrative command in one file of user code: over HTTP, by the router's broadcast, and of ``baton.Engine``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.tests.helpers.harness import Cluster, Server, get_json, post_json
from baton.tests.helpers.ports import free_port

COMMAND = Path(__file__).parents[2] / "helpers" / "count_pages.py"
FLAGS = ("--max-total-tokens", "4096", "--page-size", "16", "--admin-api-key", "admin")
SCRIPT = """
import inspect
import baton
import count_pages

if __name__ == "__main__":
    with baton.Engine("tinychat", device="cpu", log_level="warning", max_total_tokens=4096, page_size=16) as engine:
        print(engine.count_pages())
        print(engine.count_pages("cached"))
        print(engine.count_pages.__doc__, inspect.signature(engine.count_pages))
        try:
            engine.count_pages(state="lost")
        except baton.common.api.errors.InvalidRequest as error:
            print(error)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A folder with the command's file alone."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copy(COMMAND, folder)
    return folder


@pytest.fixture(scope="module")
def installed(plugin):
    """The environment of processes where pip has installed the command's file, with its entry point."""
    facts = plugin / "count_pages-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: count-pages\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[baton.commands]\ncount_pages = count_pages\n")
    return {"PYTHONPATH": path_with(plugin)}


def path_with(folder: Path) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def admin(url: str, body: dict | None = None) -> tuple[int, dict]:
    return post_json(url + "/count_pages", body, headers={"Authorization": "Bearer admin"})


def test_an_installed_command_of_a_unified_server(installed, tmp_path):
    argv = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", *FLAGS]
    server = Server("baton.launch", argv, free_port(), tmp_path / "server.log", **installed).start()
    try:
        server.wait_ready()
        assert admin(server.url) == (200, {"success": True, "message": "256 of 256 pages are free."})
        assert admin(server.url, {"state": "cached"})[1]["message"] == "0 of 256 pages are cached."
        status, body = admin(server.url, {"state": "lost"})
        assert status == 400 and body["error"]["param"] == "state"
        assert post_json(server.url + "/count_pages")[0] == 401
        operation = get_json(server.url + "/openapi.json")["paths"]["/count_pages"]["post"]
        assert operation["summary"] == "Counts the pages of one state." and not operation["requestBody"]["required"]
        assert server.stop() == 0, repr(server)
    finally:
        server.kill()


def test_the_router_asks_both_servers_of_a_pair(installed, tmp_path):
    router_flags = ("--admin-api-key", "admin", "--worker-api-key", "admin")
    with Cluster(tmp_path, flags=FLAGS, router_flags=router_flags, environment=installed) as cluster:
        urls = [server.url for server in cluster.workers]
        assert post_json(cluster.url + "/count_pages")[0] == 401
        assert admin(cluster.url, {"state": "free"}) == (200, {
            "success": True, "workers": dict.fromkeys(urls, 200),
            "messages": dict.fromkeys(urls, "256 of 256 pages are free.")})
        status, body = admin(cluster.url, {"state": "lost"})
        assert status == 400 and not body["success"] and body["messages"] == {} and body["errors"].keys() == {*urls}


def test_a_script_gives_its_command_by_a_method_of_the_engine(plugin, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], env=os.environ | {"PYTHONPATH": path_with(plugin)}, text=True,
                          capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    first, second, described, refused = done.stdout.splitlines()
    assert (first, second) == ("256 of 256 pages are free.", "0 of 256 pages are cached.")
    assert described == ("Counts the pages of one state. "
                         "(state: \"Literal['free', 'allocated', 'cached']\" = 'free') -> 'str'")
    assert refused.startswith("state: invalid enum value")
