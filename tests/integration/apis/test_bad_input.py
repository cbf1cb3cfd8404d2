"""Mistakes of users and operators: a sentence, the right status, and a server that goes on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest

from baton.tests.helpers.harness import post_json
from baton.tests.helpers.ports import free_port

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def raw_post(url, body, content_type="application/json"):
    request = urllib.request.Request(url, body, {"Content-Type": content_type}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


BAD = {
    "messages of the wrong type": (CHAT, {"model": "tinychat", "messages": "Hello"}, 400),
    "no messages": (CHAT, {"model": "tinychat", "messages": []}, 400),
    "unknown model": (CHAT, {"model": "gpt-none", "messages": HELLO}, 404),
    "negative max_tokens": (CHAT, {"model": "tinychat", "messages": HELLO, "max_tokens": -1}, 400),
    "temperature as text": (CHAT, {"model": "tinychat", "messages": HELLO, "temperature": "hot"}, 400),
    "temperature below 0": (CHAT, {"model": "tinychat", "messages": HELLO, "temperature": -1}, 400),
    "over-long prompt": (CHAT, {"model": "tinychat", "messages": [{"role": "user", "content": "word " * 9000}]}, 400),
    "empty prompt": ("/v1/completions", {"model": "tinychat", "prompt": ""}, 400),
    "empty ids": ("/generate", {"input_ids": []}, 400),
    "ids beyond the vocabulary": ("/generate", {"input_ids": [10**6]}, 400),
    "no prompt at all": ("/generate", {"sampling_params": {}}, 400),
    "unknown sampling type": ("/generate", {"text": "Hi", "sampling_params": {"top_p": "all"}}, 400),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("through", ["unified", "relay"])
def test_bad_requests_get_a_sentence(request, through, name):
    server = request.getfixturevalue(through)
    path, body, status = BAD[name]
    got, answer = post_json(server.url + path, body)
    assert got == status, answer
    error = answer["error"]
    assert error["message"].endswith(".") and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("through", ["unified", "relay"])
@pytest.mark.parametrize("body", [b"{", b"[1]", b"null", b"", b"\xff\xfe", b'{"messages": [}'])
def test_bodies_that_are_no_json_object(request, through, body):
    server = request.getfixturevalue(through)
    status, answer = raw_post(server.url + CHAT, body)
    assert status == 400 and json.loads(answer)["error"]["message"]


def test_a_body_of_10_mb(unified, relay):
    body = json.dumps({"model": "tinychat", "messages": [{"role": "user", "content": "a " * 5_000_000}]}).encode()
    for server in (unified, relay):
        status, answer = raw_post(server.url + CHAT, body)
        assert status in (400, 413) and json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("fields", [
    {"bootstrap_host": 5, "bootstrap_port": 1, "bootstrap_room": 1},
    {"bootstrap_host": "127.0.0.1", "bootstrap_port": "x", "bootstrap_room": 1},
    {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": "room"},
    {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1},
    {}])
def test_a_prefill_server_wants_proper_bootstrap_fields(relay, fields):
    body = {"model": "tinychat", "messages": HELLO} | fields
    status, answer = post_json(relay.prefill[0].url + CHAT, body)
    assert status == 400 and "bootstrap" in answer["error"]["message"]


def test_decode_ends_when_there_is_no_prefill_server(relay):
    """Nobody listens at the named bootstrap address: the request fails with a sentence, long before a minute."""
    body = {"model": "tinychat", "messages": HELLO, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": free_port(), "bootstrap_room": 77}
    status, answer = post_json(relay.decode[0].url + CHAT, body, timeout=60)
    assert status in (502, 504) and answer["error"]["message"]
    relay.decode[0].assert_clean()


def test_the_servers_are_healthy_after_all_that(unified, relay):
    for server in (unified, relay):
        status, answer = post_json(server.url + CHAT, {"model": "tinychat", "messages": HELLO})
        assert status == 200 and answer["choices"][0]["message"]["content"]
    for server in (unified, *relay.workers):
        server.assert_clean()


def start_fails(*argv, timeout=60):
    """Run a command that must fail at start; returns its last line on stderr."""
    process = psutil.Popen([sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=timeout)
    assert process.returncode not in (0, None) and process.returncode > 0
    assert "Traceback" not in errors, errors
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid != process.pid
            and list(argv) == (p.info["cmdline"] or [])[1:]]
    assert not left
    return errors.strip().splitlines()[-1]


@pytest.mark.parametrize("module", ["baton.prefill.launch", "baton.decode.launch"])
def test_a_missing_checkpoint(module):
    line = start_fails("-m", module, "--model-path", "/nowhere/model", "--device", "cpu",
                       "--port", str(free_port()))
    assert "/nowhere/model" in line and line.endswith(".")


def test_an_unsupported_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoneForCausalLM"], "hidden_size": 8}))
    line = start_fails("-m", "baton.decode.launch", "--model-path", str(tmp_path), "--device", "cpu",
                       "--port", str(free_port()))
    assert "NoneForCausalLM is not supported" in line and "docs/models.md" in line


@pytest.mark.parametrize("module, flags", [
    ("baton.decode.launch", ["--model-path", "tinychat", "--device", "cpu"]), ("baton.router.launch", [])])
def test_an_occupied_port(module, flags):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        line = start_fails("-m", module, *flags, "--port", str(port))
    assert str(port) in line and "in use" in line


def test_an_occupied_bootstrap_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        line = start_fails("-m", "baton.prefill.launch", "--model-path", "tinychat", "--device", "cpu",
                           "--port", str(free_port()), "--disaggregation-bootstrap-port", str(port))
    assert str(port) in line
