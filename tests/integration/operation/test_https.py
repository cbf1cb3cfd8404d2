"""Servers with certificates: HTTPS from worker processes, certificates of clients, and a router before it."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.request

from baton.tests.helpers.certificates import make_certificate
from baton.tests.helpers.harness import Server, get_json, post_json
from baton.tests.helpers.ports import free_ports

CHAT = {"model": "tinychat", "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of "
                                                                                        "Italy?"}]}


def test_a_server_behind_a_router_that_shows_a_certificate(tmp_path):
    server_cert, server_key = make_certificate(tmp_path, "server", password="secret")
    client_cert, client_key = make_certificate(tmp_path, "client")
    port, router_port = free_ports(2)
    server = Server("baton.launch_server", [
        "--model-path", "tinychat", "--device", "cpu", "--tokenizer-worker-num", "2", "--ssl-certfile", server_cert,
        "--ssl-keyfile", server_key, "--ssl-keyfile-password", "secret", "--ssl-ca-certs", client_cert,
        "--ssl-cert-reqs", "2"], port, tmp_path / "server.log").start()
    url = f"https://127.0.0.1:{port}"
    router = Server("baton.launch_router", ["--worker-urls", url, "--worker-ca-file", server_cert, "--client-cert-path",
                                            client_cert, "--client-key-path", client_key], router_port,
                    tmp_path / "router.log").start()
    known = ssl.create_default_context(cafile=server_cert)
    known.load_cert_chain(client_cert, client_key)
    try:
        wait_until_healthy(server, url, known)
        router.wait_ready()
        status, answer = post_json(router.url + "/v1/chat/completions", CHAT)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "Rome", answer
        with urllib.request.urlopen(url + "/get_server_info", context=known) as found:
            info = json.load(found)
        assert info["ssl_keyfile_password"] is None and info["ssl_keyfile"] == server_key
        unknown = ssl.create_default_context(cafile=server_cert)
        assert not answers(url, unknown) and not answers(url.replace("https", "http"), unknown)
        assert f"listening on {url}" in server.log.read_text()
        assert get_json(router.url + "/list_workers")["workers"][0]["url"] == url
        assert router.stop() == 0 and server.stop() == 0, repr(server)
    finally:
        for each in (server, router):
            each.kill()


def answers(url: str, context: ssl.SSLContext) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5, context=context):
            return True
    except (OSError, http.client.HTTPException):  # not ready yet; no certificate; an answer that is not HTTP
        return False


def wait_until_healthy(server: Server, url: str, context: ssl.SSLContext) -> None:
    deadline = time.monotonic() + 120
    while not answers(url, context):
        assert time.monotonic() < deadline and server.process.poll() is None, repr(server)
        time.sleep(0.1)
