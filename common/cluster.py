"""Starts and supervises the processes of a cluster on one host, for demos and to try Baton on a laptop.

A part is one server process with an HTTP port. The servers are started together, the router when they are ready, so
that its port answers no request before; each shows one status line until it is ready, and all stop together: on Ctrl-C,
on SIGTERM, when the terminal is closed, or when one of them dies.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .config.logs import LogArgs
from .obs.logging import cut
from .process import die_with

log = logging.getLogger("baton.cluster")

POLL_SECONDS = 0.2
STOP_GRACE_SECONDS = 15.0
BAR_WIDTH = 24
_OWN_PARTS = ssl._create_unverified_context()  # of certificates that name the host, not 127.0.0.1


@dataclass
class ClusterProcess:
    """One process: ``argv`` starts it, ``url + probe`` answers 200 once it is ready, its output goes to ``log``."""

    name: str
    argv: Sequence[str]
    url: str
    log: Path
    probe: str = "/health"
    is_last: bool = False
    """True if it is started when all others are ready."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    ready: bool = field(default=False, init=False)
    status: str = field(default="waiting", init=False)
    misfit: str | None = field(default=None, init=False)
    """The reason why a router will never be ready: its prefill and decode servers do not fit together."""

    def start(self) -> None:
        self.log.write_bytes(b"")
        with self.log.open("ab") as output:  # appended to, so that it can be cut
            # A session of its own: Ctrl-C reaches the supervisor alone, which stops the parts in order.
            # It must not outlive the supervisor either: it would occupy its port unnoticed.
            self.process = subprocess.Popen(self.argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                            preexec_fn=partial(die_with, os.getpid()))
        self.status = "starting"

    @property
    def dead(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def check(self) -> None:
        """Asks the process for its health; sets ``ready``, ``status`` and ``misfit``."""
        try:
            with urllib.request.urlopen(self.url + self.probe, timeout=2, context=_OWN_PARTS) as answer:
                self.ready, self.status = answer.status == 200, "ready"
        except urllib.error.HTTPError as error:
            body = error.read()
            self.ready, self.status, self.misfit = False, _describe(body), _misfit_in(body)
        except OSError:
            self.ready, self.status = False, "starting"

    def last_words(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join("    " + line for line in text[-lines:])


def _describe(body: bytes) -> str:
    """A status phrase, with a bar where the server reports progress, out of ``/health``'s 503 body."""
    try:
        health = json.loads(body)
        stage, progress = health["stage"], float(health["progress"])
    except (ValueError, KeyError, TypeError):
        return "starting"
    done = round(progress * BAR_WIDTH)
    return f"{stage} [{'#' * done}{'.' * (BAR_WIDTH - done)}] {progress:4.0%}"


def _misfit_in(body: bytes) -> str | None:
    """The reason of the first pair that does not fit, out of a router's ``/readiness``; None where all do."""
    try:
        misfits = json.loads(body)["misfits"]
        return str(misfits[0]["why"]) if misfits else None
    except (ValueError, KeyError, TypeError):
        return None


class _Board:
    """One line a part: redrawn in place on a terminal, printed on change elsewhere."""

    def __init__(self, parts: Sequence[ClusterProcess], logs: LogArgs):
        self._parts = parts
        self._logs = logs
        self._width = max(len(part.name) for part in parts)
        self._shown: dict[str, str] = {}
        self._live = sys.stdout.isatty() and not logs.log_json

    def draw(self) -> None:
        if self._live and self._shown:
            sys.stdout.write(f"\x1b[{len(self._parts)}A")
        for part in self._parts:
            line = f"  {part.name:<{self._width}}  {part.url}  {part.status}"
            if self._live:
                sys.stdout.write(f"\x1b[2K{line}\n")
            elif self._shown.get(part.name) != line:
                say(line, self._logs)
            self._shown[part.name] = line
        sys.stdout.flush()


def say(text: str, logs: LogArgs) -> None:
    """Informs the user who started the cluster: on stdout, or with --log-json by a line of the log."""
    if logs.log_json:
        log.info("%s", text.strip())
    else:
        print(text, flush=True)


def run_parts(parts: Sequence[ClusterProcess], when_ready: Callable[[], bool], logs: LogArgs | None = None) -> int:
    """Starts all parts, calls ``when_ready`` once all are ready, and waits if it returns True; returns the exit code.

    0 after Ctrl-C, SIGTERM or SIGHUP or where ``when_ready`` returned False, 1 where a part died or servers do not fit.
    ``logs`` says how large the parts' logs may grow, and whether messages are JSON.
    """
    stop, logs = _StopFlag(), logs or LogArgs()
    try:
        _start(parts)
        board = _Board(parts, logs)
        greeted = False
        while not stop.raised:
            if dead := next((part for part in parts if part.dead), None):
                return _report_death(dead)
            _cut_logs(parts, logs.max_bytes)
            if not greeted:
                greeted = _all_ready(parts)
                _start(parts)
                board.draw()
                if misfit := next((part.misfit for part in parts if part.misfit), None):
                    print(misfit, file=sys.stderr, flush=True)
                    return 1
                if greeted and not when_ready():
                    return 0
            time.sleep(POLL_SECONDS)
        return 0
    finally:
        _stop(parts)


def _cut_logs(parts: Sequence[ClusterProcess], max_bytes: int) -> None:
    for part in parts:
        with contextlib.suppress(OSError):  # a full disk, or a file that somebody removed: the parts go on
            cut(part.log, max_bytes)


class _StopFlag:
    """Raised by SIGINT, SIGTERM or SIGHUP; a second signal changes nothing, since the stop has begun."""

    def __init__(self) -> None:
        self.raised = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._raise)

    def _raise(self, *_: object) -> None:
        self.raised = True


def _start(parts: Sequence[ClusterProcess]) -> None:
    """Starts the parts that run not yet and have nothing to wait for."""
    others_ready = all(part.ready for part in parts if not part.is_last)
    for part in parts:
        if part.process is None and (others_ready or not part.is_last):
            part.start()


def _all_ready(parts: Sequence[ClusterProcess]) -> bool:
    for part in parts:
        if part.process is not None and not part.ready:
            part.check()
    return all(part.ready for part in parts)


def _report_death(part: ClusterProcess) -> int:
    assert part.process is not None
    print(f"{part.name} ended with exit code {part.process.returncode}; its last lines ({part.log}):\n"
          f"{part.last_words()}", file=sys.stderr, flush=True)
    return 1


def _stop(parts: Sequence[ClusterProcess]) -> None:
    """SIGTERM to all, in reverse order of start so that the router leaves first; SIGKILL after a grace."""
    running = [part.process for part in reversed(parts) if part.process is not None and part.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(url: str, model: str, question: str, timeout: float = 120.0, key: str | None = None) -> str:
    """Sends one chat request to an OpenAI-compatible server; returns the answer's text. Raises OSError."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout, context=_OWN_PARTS) as answer:
        result: str = json.load(answer)["choices"][0]["message"]["content"]
        return result
