"""Preflight checks report mistakes before any process of the engine is started."""

from __future__ import annotations

import logging
import os
import socket

import pytest

from baton.common.config import packages
from baton.common.runner import preflight
from baton.common.serving import server as server_module
from baton.launch import launch_cluster, launch_server
from baton.router.launch import main as launch_router
from baton.tests.helpers.ports import free_port, free_ports


@pytest.fixture(autouse=True)
def own_logging():
    """Restores the log handlers: commands set up logging of their process, which is the tests' here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def taken():
    """A port in use; the one below it is free."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_ports(2)[1]))
        sock.listen()
        yield sock.getsockname()[1]


def refused(capfd, command, *flags: str) -> str:
    """The sentence with which a command ends."""
    with pytest.raises(SystemExit) as end:
        command(list(flags))
    assert end.value.code in (1, 2)
    [line] = capfd.readouterr().err.splitlines()
    assert "error: " in line and line.endswith(".")
    return line


@pytest.fixture
def no_engine(monkeypatch):
    def never(*args):
        raise AssertionError("a server began to serve")

    monkeypatch.setattr(server_module.uvloop, "run", never)


CPU = ("--model-path", "tinychat", "--device", "cpu")


def draft(name: str) -> tuple[str, str]:
    return "--speculative-draft-model-path", f"tinychat-{name}"


@pytest.mark.parametrize(("flags", "sentence"), [
    (("--max-total-tokens", "1000000000000"), "GiB: lower it to"),
    (("--host", "203.0.113.7"), "choose another --host"),
    (("--host", "nowhere.invalid"), "--host nowhere.invalid is no address"),
    (("--context-length", "1000000000"), "--context-length 1000000000 must be"),
    (("--tp-size", "5"), "--tp-size 5 must divide"),
    (("--chat-template", "/nowhere/chat.jinja"), "Cannot read --chat-template"),
    (("--log-dir", "/proc/nowhere"), "Cannot write to --log-dir"),
    (("--model-path", "/nowhere/model"), "there is no checkpoint folder"),
    (("--kv-events-port", "7000", "--disable-radix-cache"), "drop --disable-radix-cache"),
    (("--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "203.0.113.1:3000"), "choose another --dist-init-addr"),
    (("--unknown",), "--unknown"),
    (("--dp", "0"), "--dp-size must be 1 or more, not 0"),
    (("--speculative-algorithm", "NEXTN"), "drafts by layers of multi-token prediction, and tinychat has none"),
    (("--speculative-algorithm", "EAGLE"), "name a draft model by --speculative-draft-model-path"),
    (("--speculative-algorithm", "EAGLE", *draft("eagle3")), "is a head of EAGLE-3, which --speculative-algorithm"),
    (("--speculative-algorithm", "EAGLE3", *draft("nextn")), "read: set --speculative-algorithm NEXTN."),
    (("--speculative-algorithm", "NEXTN", *draft("draft")), "is a whole model, which --speculative-algorithm NEXTN"),
])
def test_servers(capfd, no_engine, flags, sentence):
    assert sentence in refused(capfd, launch_server, *CPU, "--port", str(free_port()), *flags)


@pytest.mark.parametrize(("flags", "package"), [
    (("--disaggregation-mode", "prefill"), "nixl"),
    (("--attention-backend", "flashinfer", "--device", "auto"), "flashinfer-python"),
    (("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"), "mooncake-transfer-engine")])
def test_packages_that_are_missing(capfd, no_engine, monkeypatch, flags, package):
    monkeypatch.setattr(preflight, "is_installed", lambda name: False)
    monkeypatch.setattr(preflight, "_GPU_FILES", ("/dev/null",))
    assert f"pip install {package}" in refused(capfd, launch_server, *CPU, "--port", str(free_port()), *flags)
    assert packages.is_installed("json")
    assert not packages.is_installed("no_such_module") and not packages.is_installed("json.no_such.module")


def test_a_gpu_that_is_not_there(capfd, no_engine, monkeypatch):
    monkeypatch.setattr(preflight, "_GPU_FILES", ())
    flags = ("--model-path", "tinychat", "--device", "cuda", "--port", str(free_port()))
    assert "--device cuda needs a GPU" in refused(capfd, launch_server, *flags)


@pytest.mark.parametrize("flags", [
    ("--attention-backend", "flashinfer"), ("--attention-backend", "fa3"), ("--attention-backend", "triton"),
    ("--decode-attention-backend", "flashinfer"), ("--sampling-backend", "triton"),
    ("--enable-layerwise-nvtx-marker",), ("--enable-profile-cuda-graph",)], ids=" ".join)
def test_flags_that_need_a_gpu(capfd, no_engine, monkeypatch, flags):
    """The GPU is what is missing first, whether or not their packages are installed."""
    monkeypatch.setattr(preflight, "_GPU_FILES", ())
    for device, why in (("auto", "this host shows none"), ("cpu", "--device is cpu")):
        with pytest.raises(SystemExit):
            launch_server(["--model-path", "tinychat", "--device", device, "--port", str(free_port()), *flags])
        given = " ".join(flags).replace(" fa3", " flashinfer")
        assert f"error: {given} needs a GPU, and {why}" in capfd.readouterr().err


def test_templates_are_parsed(capfd, no_engine, tmp_path):
    (tmp_path / "bad.jinja").write_text("{% if x %}\n{{ y")
    flags = (*CPU, "--port", str(free_port()), "--chat-template", str(tmp_path / "bad.jinja"))
    assert "is not valid jinja: line 2" in refused(capfd, launch_server, *flags)
    (tmp_path / "good.jinja").write_text("{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}"
                                         "{% break %}{% endfor %}")
    preflight.check_template(str(tmp_path / "good.jinja"))


def test_ports_that_are_taken(capfd, no_engine, taken):
    port = str(free_port())
    assert f"port {taken}: {os.strerror(98)}; choose another --port." in refused(
        capfd, launch_server, *CPU, "--port", str(taken))
    for events in (taken, taken - 1):  # replays take the port above
        assert f"port {taken}: {os.strerror(98)}; choose another --kv-events-port." in refused(
            capfd, launch_server, *CPU, "--port", port, "--kv-events-port", str(events))


def test_clusters(capfd, taken):
    for base in (taken, taken - 1):  # the router's port, and the first server's
        assert f"port {taken}: {os.strerror(98)}; choose another --port" in refused(
            capfd, launch_cluster, "--port", str(base))
    assert "choose another --router-dp-worker-base-port." in refused(
        capfd, launch_cluster, "--port", str(free_port()), "--router-dp-worker-base-port", str(taken))
    flags = ("--port", str(free_port()), "--host", "203.0.113.7")
    assert "choose another --host" in refused(capfd, launch_cluster, *flags)


def test_routers(capfd, taken):
    port, other = map(str, free_ports(2))
    assert f"port {taken}: {os.strerror(98)}; choose another --port." in refused(
        capfd, launch_router, "--port", str(taken))
    assert "choose another --port." in refused(capfd, launch_router, "--port", str(taken), "--router-workers", "2")
    assert "choose another --prometheus-port." in refused(
        capfd, launch_router, "--port", port, "--prometheus-port", str(taken), "--prometheus-host", "127.0.0.1")
    assert "choose another --host" in refused(capfd, launch_router, "--port", other, "--host", "203.0.113.7")
    assert "Cannot write to --log-dir" in refused(capfd, launch_router, "--log-dir", "/proc/nowhere")
