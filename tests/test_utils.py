"""The helpers of notebooks: they start, await and stop a process that answers like a server, and merge streams."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types

import pytest

from baton import utils

STUB = '''
import http.server, os, subprocess, sys

paths = []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        paths.append(self.path)
        status = 503 if self.path == "/health" and paths.count("/health") < 3 else 200
        with open(sys.argv[1] + ".asked", "w") as file:
            file.write(" ".join(paths))
        self.send_response(int(os.environ.get("STUB_STATUS", status)))
        self.end_headers()

    def log_message(self, *args):
        pass

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub server.py"
    path.write_text(STUB)
    return f"{sys.executable} \\\n '{path}' {tmp_path}/child"


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_is_started_awaited_and_ended_with_its_children(stub, tmp_path):
    process, port = utils.launch_server_cmd(stub, host="127.0.0.1")
    try:
        utils.wait_for_server(f"http://127.0.0.1:{port}", timeout=60, process=process)
        child = int((tmp_path / "child").read_text())
        assert alive(child)
        assert (tmp_path / "child.asked").read_text().split() == ["/health"] * 3 + ["/v1/models"]
    finally:
        utils.terminate_process(process)
    assert process.returncode is not None
    deadline = time.monotonic() + 30
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    utils.terminate_process(process)  # once more does nothing


def test_a_key_that_is_refused_is_a_sentence(stub, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    process, port = utils.launch_server_cmd(f"STUB_STATUS=401 {stub}", host="127.0.0.1")
    try:
        with pytest.raises(RuntimeError, match="OPENAI_API_KEY"):
            utils.wait_for_server(f"http://127.0.0.1:{port}", timeout=60, process=process)
    finally:
        utils.terminate_process(process)


def test_a_process_that_ends_is_not_awaited():
    process, port = utils.launch_server_cmd(f"{sys.executable} -c 'raise SystemExit(3)'", host="127.0.0.1")
    process.wait()
    with pytest.raises(RuntimeError, match="status 3"):
        utils.wait_for_server(f"http://127.0.0.1:{port}", process=process)
    with pytest.raises(TimeoutError, match="not ready after 0 s"):
        utils.wait_for_server(f"http://127.0.0.1:{port}", timeout=0)


def test_a_command_needs_a_program_and_keeps_its_port():
    with pytest.raises(ValueError, match="no program"):
        utils.launch_server_cmd("A=1 B=2")
    code = "import os, sys; sys.exit(os.environ['A'] != '1 2' or sys.argv[1:] != ['--port', '7'])"
    process, port = utils.launch_server_cmd(f'A="1 2" {sys.executable} -c "{code}"', port=7)
    assert port == 7 and process.wait(60) == 0


@pytest.mark.parametrize("command, started", [
    ("python -m sglang.launch_server --tp 2", [sys.executable, "-m", "baton.launch_server", "--tp", "2"]),
    ("A=1 python3 x.py", [sys.executable, "x.py"]), ("sglang.x -m sglang.y", ["sglang.x", "-m", "baton.y"])])
def test_the_documents_commands_are_ours(monkeypatch, command, started):
    seen = []
    monkeypatch.setattr(utils.subprocess, "Popen", lambda words, **options: seen.extend(words))
    utils.launch_server_cmd(command, port=7)
    assert seen == [*started, "--port", "7"]


def test_text_is_highlighted_in_notebooks_and_printed_elsewhere(monkeypatch, capsys):
    utils.print_highlight({"a": 1})
    assert capsys.readouterr().out == "{'a': 1}\n"
    shown = []
    notebook, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    notebook.get_ipython = lambda: types.SimpleNamespace(kernel=1)
    display.HTML, display.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    utils.print_highlight("a\nb")
    assert shown == ["<strong style='color: #00008B;'>a<br>b</strong>"] and capsys.readouterr().out == ""


@pytest.mark.parametrize("before, chunk, new", [
    ("", "abc", "abc"), ("ab", "abc", "c"), ("xab", "abc", "c"), ("abc", "abc", ""), ("ab", "cd", "cd")])
def test_overlap_is_trimmed(before, chunk, new):
    assert utils.trim_overlap(before, chunk) == new


async def test_streams_are_merged():
    chunks = [{"text": "one"}, {"text": "one two"}, {"text": "one two three"}]

    async def stream():
        for chunk in chunks:
            yield chunk

    async def started(prompt, sampling, stream_):
        return stream()

    llm = types.SimpleNamespace(generate=lambda prompt, sampling, stream: iter(chunks),
                                async_generate=lambda prompt, sampling, stream: started(prompt, sampling, stream))
    assert utils.stream_and_merge(llm, "p", {}) == "one two three"
    assert [new async for new in utils.async_stream_and_merge(llm, "p", {})] == ["one", " two", " three"]


def test_import_brings_nothing_of_the_engine():
    code = "import sys, baton.utils; sys.exit(any(name in sys.modules for name in ('torch', 'aiohttp')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, env=os.environ).returncode == 0
