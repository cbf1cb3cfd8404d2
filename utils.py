"""Helpers of notebooks and scripts that start a server, ask it and stop it; names and signatures are SGLang's."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from typing import Any

__all__ = ["async_stream_and_merge", "launch_server_cmd", "print_highlight", "stream_and_merge", "terminate_process",
           "trim_overlap", "wait_for_server"]

_PORTS = range(30000, 40000)
_STOP_SECONDS = 30.0


def launch_server_cmd(command: str, host: str = "0.0.0.0", port: int | None = None
                      ) -> tuple[subprocess.Popen[str], int]:
    """Starts ``command --port PORT`` and returns the process and the port, a free one of ``host`` by default.

    ``command`` is a shell's line, which may begin with ``NAME=VALUE`` and be broken by backslashes; no shell runs it.
    ``python`` is this interpreter, and modules of SGLang, where it is not installed, are Baton's of the same name. Its
    output goes where this process's goes. Raises ValueError for a command without a program, OSError where the
    program cannot be started, RuntimeError where no port is free.
    """
    words = shlex.split(command.replace("\\\n", " "))
    environment = dict(os.environ)
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words:
        raise ValueError(f"The command names no program: {command!r}.")
    port = _free_port(host) if port is None else port
    process = subprocess.Popen([*_installed(words), "--port", str(port)], text=True, stderr=subprocess.STDOUT,
                               env=environment, start_new_session=True)  # a group of its own, ended with its children
    return process, port


def _installed(words: list[str]) -> list[str]:
    """The command with this interpreter for ``python``, and Baton's modules for SGLang's where only these are here."""
    if words[0] in ("python", "python3"):
        words = [sys.executable, *words[1:]]
    if words[1:2] == ["-m"] and len(words) > 2 and words[2].startswith("sglang.") and not find_spec("sglang"):
        words = [*words[:2], f"baton.{words[2].removeprefix('sglang.')}", *words[3:]]
    return words


def _free_port(host: str) -> int:
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"No port of {host} between {_PORTS[0]} and {_PORTS[-1]} is free.")


def wait_for_server(base_url: str, timeout: float | None = None, process: subprocess.Popen[Any] | None = None) -> None:
    """Returns once the server is healthy, which one that loads its weights is not (503), and lists its models.

    The key that it asks for is OPENAI_API_KEY's. Raises TimeoutError after ``timeout`` seconds (None: never),
    RuntimeError where the key is refused or ``process``, the server's, has ended.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    key = os.environ.get("OPENAI_API_KEY")
    paths = ["/health", "/v1/models"]
    while paths:
        request = urllib.request.Request(base_url.rstrip("/") + paths[0],
                                         headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            with urllib.request.urlopen(request, timeout=5):
                del paths[0]
                continue
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise RuntimeError(f"{base_url} refuses the key of OPENAI_API_KEY (HTTP {error.code}).") from None
            if paths[0] == "/health" and error.code != 503:
                del paths[0]  # another server's, which has no such endpoint
                continue
        except OSError:
            pass
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"The server's process has ended with status {process.returncode}.")
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{base_url} is not ready after {timeout:g} s.")
        time.sleep(0.2)


def terminate_process(process: subprocess.Popen[Any]) -> None:
    """Ends a process of ``launch_server_cmd`` with its children: it may finish within 30 s, then it is killed."""
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass  # the whole group has ended


def print_highlight(html_content: Any) -> None:
    """Shows a text in bold blue in a notebook; prints it elsewhere."""
    notebook = sys.modules.get("IPython")
    shell = notebook.get_ipython() if notebook is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        print(html_content)
        return
    from IPython.display import HTML, display

    text = str(html_content).replace("\n", "<br>")
    display(HTML(f"<strong style='color: #00008B;'>{text}</strong>"))


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """Returns ``new_chunk`` without its longest beginning with which ``existing_text`` ends."""
    for size in range(min(len(existing_text), len(new_chunk)), 0, -1):
        if existing_text.endswith(new_chunk[:size]):
            return new_chunk[size:]
    return new_chunk


def stream_and_merge(llm: Any, prompt: Any, sampling_params: Mapping[str, Any]) -> str:
    """The whole text of a streamed answer of an ``Engine``, whose chunks may repeat what came before."""
    merged = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        merged += trim_overlap(merged, chunk["text"])
    return merged


async def async_stream_and_merge(llm: Any, prompt: Any, sampling_params: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yields the new text of each chunk of an ``Engine``'s streamed answer."""
    merged = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        merged += (new := trim_overlap(merged, chunk["text"]))
        yield new
