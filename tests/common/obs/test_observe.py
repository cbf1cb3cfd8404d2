"""The watchdog, the request log and the crash dump."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from baton.common.api.errors import ConfigError
from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.engine.watchdog import EXIT_CODE, Watchdog
from baton.common.serving.context.request_log import RequestLog
from baton.tests.helpers.fake_engine import Seed, make_checkpoint
from baton.tests.helpers.harness import post_json
from baton.tests.helpers.serving import Server

REQUEST = Generate("a", list(range(5000)), SamplingParams(temperature=0.5))


def test_watchdog_barks_once_the_loop_stands_still():
    told = threading.Event()
    watchdog = Watchdog(0.4, lambda silent: told.set())
    for _ in range(10):
        watchdog.beat()
        time.sleep(0.05)
    with watchdog.suspended():
        assert not told.wait(1.0)
    assert told.wait(10)
    watchdog.close()


def test_stalls_are_reported_once_each_and_do_not_end_the_loop():
    stalls = []
    watchdog = Watchdog(0, soft_timeout=0.1, on_stall=stalls.append)
    for count in (1, 2):
        watchdog.beat()
        deadline = time.monotonic() + 10
        while len(stalls) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(stalls) == count
    watchdog.close()


def test_a_stall_shows_its_stacks():
    code = ("from baton.common.engine.watchdog import Watchdog\nimport time\n"
            "def stands_still():\n    time.sleep(0.6)\nWatchdog(0, soft_timeout=0.2)\nstands_still()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stderr.count("in stands_still") == 1


def test_a_hanging_process_shows_its_stacks_and_ends():
    code = ("from baton.common.engine.watchdog import Watchdog\nimport time\n"
            "def stands_still():\n    time.sleep(60)\nWatchdog(0.2)\nstands_still()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == EXIT_CODE and "in stands_still" in done.stderr


@pytest.mark.parametrize("level, begins, ends", [
    (0, {"prompt_tokens"}, set()), (1, {"prompt_tokens", "sampling"}, set()),
    (2, {"prompt_tokens", "sampling", "input_ids"}, {"text"}),
    (3, {"prompt_tokens", "sampling", "input_ids"}, {"text"}),
])
def test_levels_of_the_request_log(caplog, level, begins, ends):
    request_log = RequestLog(level, None)
    with caplog.at_level(logging.INFO, "baton.requests"):
        request_log.start([REQUEST])
        request_log.end("a", "stop", num_output_tokens=3, seconds=0.5, text="x" * 5000)
    begin, end = (json.loads(record.getMessage()) for record in caplog.records)
    assert begin.keys() == {"event", "rid"} | begins
    assert end.keys() == {"event", "rid", "outcome", "output_tokens", "seconds"} | ends
    if level >= 2:
        assert len(begin["input_ids"]) == len(end["text"]) == (2048 if level == 2 else 5000)


def test_the_request_log_changes_while_it_runs(caplog, tmp_path):
    request_log = RequestLog(None, None)
    request_log.configure(0, str(tmp_path / "new"))
    with caplog.at_level(logging.INFO, "baton.requests"):
        request_log.start([REQUEST])
        request_log.configure(None, None)
        assert request_log.level is None and request_log.active, "the folder stays"
        request_log.start([msgspec.structs.replace(REQUEST, rid="b")])
    assert [json.loads(record.getMessage())["rid"] for record in caplog.records] == ["a"]
    assert request_log.dump("It died.").parent == tmp_path / "new"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give another --crash-dump-folder"):
        request_log.configure(3, str(tmp_path / "file" / "new"))
    assert request_log.level is None


def test_a_dump_holds_what_ran_and_what_ended(tmp_path):
    request_log = RequestLog(None, tmp_path / "new")
    request_log.start([REQUEST, msgspec.structs.replace(REQUEST, rid="b")])
    request_log.end("a", "length", num_output_tokens=7, seconds=1.0, text="")
    first, *entries = map(json.loads, request_log.dump("It died.").read_text().splitlines())
    assert first["reason"] == "It died."
    assert [(e["request"]["rid"], e["outcome"], e["num_output_tokens"]) for e in entries] == [
        ("a", "length", 7), ("b", None, 0)]
    assert RequestLog(0, None).dump("It died.") is None


def test_a_server_whose_engine_dies_leaves_a_dump(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    server = Server(tmp_path / "log", "--model-path", str(folder), "--log-requests", "--crash-dump-folder",
                    str(tmp_path / "dumps"))
    try:
        server.wait_ready()
        body = {"text": "hello", "rid": "fatal", "sampling_params": {"seed": int(Seed.DIE)}}
        assert post_json(server.url + "/generate", body)[0] == 503
        assert server.process.wait(30) == 1
    finally:
        server.kill()
    [dump] = (tmp_path / "dumps").iterdir()
    assert any(json.loads(line).get("request", {}).get("rid") == "fatal" for line in dump.read_text().splitlines())
    assert '"event":"begin","rid":"fatal"' in (tmp_path / "log").read_text()
