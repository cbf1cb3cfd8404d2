"""Lines of requests: collected, then written in bulk, the same as one record each would be."""

from __future__ import annotations

import io
import json
import logging

import pytest

from baton.common.obs.logging import JsonLine, TextLine
from baton.router.config.endpoint import Endpoint
from baton.router.obs.access_log import MAX_BUFFERED_LINES, AccessLog
from baton.router.workers.registry import Worker

PAIR = tuple(Worker(Endpoint.parse(f"http://{host}:30001")) for host in "ab")


class Loop:
    """Runs the scheduled callbacks on request."""

    def __init__(self):
        self.due = []

    def call_later(self, delay, callback):
        self.due.append(callback)


@pytest.fixture
def written():
    """The output of the router's logger; ``formatter`` may be set."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("baton.router")
    logger.addHandler(handler)
    yield lambda formatter: (handler.setFormatter(formatter), stream)[1]
    logger.removeHandler(handler)


def note(log: AccessLog, request_id: bytes, path: bytes = b"/generate", workers=PAIR[:1]) -> None:
    log.note(b"POST", path, 200, 0.0125, request_id, workers, 1)


def test_lines_are_written_together_in_order(written):
    stream, loop = written(TextLine("router")), Loop()
    log = AccessLog(loop)
    note(log, b"r1")
    note(log, b"r2", workers=PAIR)
    assert not stream.getvalue() and len(loop.due) == 1
    loop.due.pop()()
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" INFO    router: request method=POST path=/generate status=200 duration_ms=12.500 "
                          "request_id=r1 worker=http://a:30001 retries=1")
    assert second.endswith('request_id=r2 worker="http://a:30001 http://b:30001" retries=1')
    note(log, b"r3")
    log.flush()
    assert "request_id=r3" in stream.getvalue()


def test_many_do_not_wait_for_the_clock(written):
    stream, log = written(TextLine("router")), AccessLog(Loop())
    for number in range(MAX_BUFFERED_LINES + 1):
        note(log, b"%d" % number)
    assert len(stream.getvalue().splitlines()) == MAX_BUFFERED_LINES


@pytest.mark.parametrize("hostile", [b"a\nERROR b", b"\xff\x00", b'x" status=500', b"\xe2\x80\xa8", b""])
def test_a_client_cannot_forge_lines(written, hostile):
    for formatter in (TextLine("router"), JsonLine("router")):
        stream, log = written(formatter), AccessLog(Loop())
        note(log, hostile, path=b"/" + hostile)
        log.flush()
    text, structured = stream.getvalue().split("\n")[:2]
    assert stream.getvalue().count("\n") == 2
    assert text.count(" status=200 ") == 1 and text.endswith("worker=http://a:30001 retries=1")
    line = json.loads(structured)
    assert line.pop("time").endswith("Z")
    assert line == {"level": "info", "component": "router", "message": "request", "method": "POST",
                    "path": "/" + hostile.decode("latin-1"), "status": 200, "duration_ms": 12.5,
                    "request_id": hostile.decode("latin-1"), "worker": "http://a:30001", "retries": 1}
