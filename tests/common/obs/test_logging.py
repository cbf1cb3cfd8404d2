"""The log: one form for all processes, one clock, files of bounded size, and what it tells of requests."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from datetime import datetime, timezone

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.logs import LogArgs
from baton.common.obs.failures import LINES, WINDOW_SECONDS, FailureLog
from baton.common.obs.logging import JsonLine, TextLine, cut, setup_logging
from baton.tests.helpers.fake_engine import Seed, make_checkpoint
from baton.tests.helpers.harness import post_json
from baton.tests.helpers.serving import Server

TEXT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (\w+) +([\w.]+): (.*)")


def record(message: str, **fields) -> logging.LogRecord:
    made = logging.LogRecord("baton.x", logging.WARNING, "f", 1, message, (), None)
    made.created = datetime(2026, 11, 22, 1, 2, 3, 45_600, timezone.utc).timestamp()
    if fields:
        made.fields = fields
    return made


def test_text_and_json_tell_the_same():
    made = record("It\nbroke \x1b[31m\u2028", worker="http://a:1", model="a b", count=3, none=None, broken="\udc80")
    assert TextLine("router").format(made) == (
        "2026-11-22T01:02:03.045Z WARNING router: It\\nbroke \\x1b[31m\\u2028 worker=http://a:1 model=\"a b\" count=3 "
        "none=null broken=\\udc80")
    assert json.loads(JsonLine("router").format(made)) == {
        "time": "2026-11-22T01:02:03.045Z", "level": "warning", "component": "router",
        "message": "It\nbroke \x1b[31m\u2028", "worker": "http://a:1", "model": "a b", "count": 3, "none": None,
        "broken": "\udc80"}


_WRITER = """
import logging, sys
from pathlib import Path
from baton.common.obs.logging import SharedFile
handler = SharedFile(Path(sys.argv[1]), 150_000)
for number in range(2000):
    handler.emit(logging.LogRecord("x", 20, "f", 1, f"{sys.argv[2]} {number} " + "x" * 90, (), None))
"""


def test_processes_share_a_file_that_is_put_aside(tmp_path):
    path = tmp_path / "server.log"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["server.log", "server.log.1", "server.log.2"]
    assert max(file.stat().st_size for file in files) < 151_000
    lines = [line.split()[:2] for file in files for line in file.read_text().splitlines()]
    assert sorted(lines) == sorted([name, str(number)] for name in "ab" for number in range(2000))


def test_a_log_that_others_write_is_cut(tmp_path):
    path = tmp_path / "part.log"
    with path.open("ab", buffering=0) as writer:
        for round in range(6):
            writer.write(b"%d" % round * 100)
            cut(path, 0)
            cut(path, 101)
            assert path.stat().st_size == 100
            cut(path, 100)
            assert path.stat().st_size == 0
        writer.write(b"end")
    assert [file.read_bytes()[:3] for file in sorted(tmp_path.iterdir())] == [b"end", b"555", b"444", b"333"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--log-dir"):
        setup_logging(LogArgs(log_dir=str(tmp_path / "file")), "router")


def test_failures_are_bounded_and_counted(caplog):
    now = 0.0
    failures = FailureLog(logging.getLogger("baton.test"), lambda: now)
    for number in range(LINES + 7):
        failures.note(400, f"Refused {number}.")
    failures.note(502, "Ours is told still.", code="lost")
    now = WINDOW_SECONDS
    failures.note(400, "Refused again. " + "x" * 10_000)
    told = [entry for entry in caplog.records if entry.name == "baton.test"]
    assert len(told) == LINES + 2 and failures.count == LINES + 9
    assert told[-2].fields == {"status": 502, "code": "lost"} and told[-2].levelno == logging.WARNING
    assert told[-1].fields == {"status": 400, "omitted_before": 7} and len(told[-1].getMessage()) < 600


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_server_logs(tmp_path, form):
    """Every line has the form, those of the rank's process too; work and failures are told, and idle time is not."""
    folder = make_checkpoint(tmp_path / "model")
    flags = ["--log-json"] if form == "json" else []
    server = Server(tmp_path / "log", "--model-path", str(folder), "--log-interval", "0.2", "--log-dir",
                    str(tmp_path / "logs"), *flags)
    try:
        server.wait_ready()
        assert post_json(server.url + "/generate", {"text": "hello world"})[0] == 200
        body = {"text": "hello world, the quick", "sampling_params": {"seed": int(Seed.FAIL_LATER)}}
        sentence = post_json(server.url + "/generate", body)[1]["error"]["message"]
        assert post_json(server.url + "/nowhere")[0] == 404
        failed = re.compile(r'failed"?[=:](\d)')
        server.wait(lambda: sum(map(int, failed.findall(server.log.read_text()))) == 2)
        lines = server.log.read_text()
        time.sleep(0.7)  # three intervals without work
        assert server.log.read_text() == lines
        assert server.end() == 0
    finally:
        server.kill()
    printed = server.log.read_text().splitlines()
    lines = [line for line in printed if not line.startswith("service ")]  # which the fake engine prints
    assert (tmp_path / "logs" / "server.log").read_text().splitlines() == lines
    if form == "text":
        assert all(TEXT.fullmatch(line) for line in lines), lines
        text = "\n".join(lines)
        assert re.search(r"INFO +server: serving running=0 waiting=0 .*prompt_tok_s=[1-9].*output_tok_s=[1-9]", text)
        assert f"WARNING server: A request failed: {sentence} status=502 code=kv_transfer_failed path=/generate" in text
        return
    told = [json.loads(line) for line in lines]
    assert {line["level"] for line in told} == {"info", "warning"}
    serving = next(line for line in told if line["message"] == "serving")
    assert serving.keys() >= {"running", "waiting", "transferring", "token_usage", "cache_hit_rate"}
    assert any(sentence in line["message"] and line["path"] == "/generate" for line in told)
