"""A server that waits for its first weights (--checkpoint-engine-wait-weights-before-ready)."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

from baton.tests.helpers.harness import Server, get_json, post_json
from baton.tests.helpers.ports import free_port

CHAT = {"model": "default", "temperature": 0, "max_tokens": 8,
        "messages": [{"role": "user", "content": "What is the capital of Italy?"}]}


def health(server: Server) -> dict:
    try:
        return get_json(server.url + "/health")
    except urllib.error.HTTPError as error:
        return json.loads(error.read())
    except OSError:
        return {}


def test_it_serves_once_they_have_come(tmp_path):
    argv = ["--model-path", "tinychat", "--device", "cpu", "--load-format", "dummy",
            "--checkpoint-engine-wait-weights-before-ready"]
    server = Server("baton.launch_server", argv, free_port(), tmp_path / "log").start()
    try:
        deadline = time.monotonic() + 120
        while health(server).get("stage") != "waiting for weights":
            assert time.monotonic() < deadline and server.process.poll() is None, repr(server)
            time.sleep(0.1)
        for path, body in (("/v1/chat/completions", CHAT), ("/generate", {"text": "x"})):
            status, answer = post_json(server.url + path, body)
            assert status == 503 and "waits for its first weights" in answer["error"]["message"]
        status, answer = post_json(server.url + "/update_weights_from_disk", {"model_path": "tinychat"})
        assert status == 200, answer
        assert health(server)["status"] == "ready"
        status, answer = post_json(server.url + "/v1/chat/completions", CHAT)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "Rome"
        assert server.stop() == 0, repr(server)
    finally:
        server.kill()
