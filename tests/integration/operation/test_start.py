"""Starting: what a server tells while it downloads and loads, and how it ends where it cannot."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request

import pytest

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.fake_hub import COMMIT, hub
from baton.tests.helpers.harness import Server, get_json
from baton.tests.helpers.ports import free_port


def health(server) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(server.url + "/health", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return 0, {}


def until(server, condition, seconds=90.0):
    """The first answer of /health that fits."""
    deadline = time.monotonic() + seconds
    while not condition(told := health(server)[1]):
        assert server.process.poll() is None and time.monotonic() < deadline, repr(server)
        time.sleep(0.05)
    return told


def test_a_server_tells_how_far_its_download_is(tmp_path):
    with hub("org/tiny", CHECKPOINT, slow="model.safetensors") as (repository, address):
        server = Server("baton.launch", ["server", "--model-path", "org/tiny", "--device", "cpu"], free_port(),
                        tmp_path / "log", HF_ENDPOINT=address, HF_HOME=str(tmp_path / "home"),
                        HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0").start()
        try:
            told = until(server, lambda told: told.get("stage") == "downloading")
            assert told["status"] == "starting" and told["progress"] < 0.1
            repository.let(0.8)  # the hub's client writes 10 MB at once
            assert 0.5 < until(server, lambda told: told["progress"] > 0.1)["progress"] < 0.9
            body = json.dumps({"text": "Hello"}).encode()
            with pytest.raises(urllib.error.HTTPError) as refused:  # it listens meanwhile
                urllib.request.urlopen(server.url + "/generate", body, timeout=5)
            assert refused.value.code == 503 and b"downloading" in refused.value.read()
            with pytest.raises(urllib.error.HTTPError) as unlisted:  # load balancers take what lists its models
                urllib.request.urlopen(server.url + "/v1/models", timeout=5)
            assert unlisted.value.code == 503
            repository.let(1.0)
            assert until(server, lambda told: told.get("status") == "ready")
            assert get_json(server.url + "/get_server_info")["revision"] == COMMIT  # which every rank then loads
        finally:
            assert server.stop() == 0
    assert "starting: downloading, " in server.log.read_text()
    assert "starting: loading weights" in server.log.read_text()


def broken_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def odd_size(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize("harm", [broken_weights, no_weights, odd_size, broken_tokenizer])
def test_a_broken_checkpoint_is_one_sentence(tmp_path, harm):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    harm(tmp_path / "model")
    server = Server("baton.launch", ["server", "--model-path", str(tmp_path / "model"), "--device", "cpu",
                                     "--log-level", "warning"], free_port(), tmp_path / "log").start()
    try:
        assert server.process.wait(90) == 1
    finally:
        server.kill()
    [line] = server.log.read_text().splitlines()
    assert line.startswith("error: ") and line.endswith("."), line
