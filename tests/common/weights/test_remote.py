"""Checkpoints on a web server that answers ranges, and in a Redis server's keys; what is refused."""

from __future__ import annotations

import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from baton.common.api.errors import ConfigError
from baton.common.config import remote
from baton.common.config.checkpoint import check_removable, read_config
from baton.common.config.server import ModelArgs
from baton.common.models.registry import load_model_spec
from baton.common.tinychat import CHECKPOINT
from baton.common.tokenizer.tokenizer import load_tokenizer
from baton.common.weights.fingerprint import identify
from baton.common.weights.source import open_weights
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

TOKENS = np.arange(1, 12)


class Folder:
    """A folder on a web server. ``sent`` counts bytes; ``whole``: ranges are ignored; ``failures``: so many first
    answers are 503."""

    def __init__(self, root):
        self.sent, self.whole, self.failures = 0, False, 0
        folder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                file = root / self.path.lstrip("/")
                if folder.failures:
                    folder.failures -= 1
                    self.send_error(503)
                elif not file.is_file():
                    self.send_error(404)
                else:
                    content, asked = file.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
                    if asked and not folder.whole:
                        content = content[int(asked[1]):int(asked[2]) + 1]
                    self.send_response(206 if asked and not folder.whole else 200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                    folder.sent += len(content)

            def log_message(self, *args):
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def web(tmp_path):
    (tmp_path / "model").mkdir()
    folder = Folder(tmp_path / "model")
    yield folder
    folder.server.shutdown()
    folder.server.server_close()
    remote.fetch_metadata.cache_clear()


@pytest.mark.parametrize("shard", ["50GB", "40KB"])
def test_a_folder_on_a_web_server(tmp_path, web, shard):
    model = save_model(tmp_path / "model", "Llama", shard=shard)
    config = server_config(web.url, download_dir=str(tmp_path / "here"))
    runner = load_runner(config)
    found = forward(runner, [(TOKENS, 0, scattered_pages(runner, 1, 16)[0])])
    torch.testing.assert_close(found, expected_logits(model, TOKENS), atol=1e-4, rtol=0)
    copied = [file for file in (tmp_path / "here").rglob("*") if file.is_file()]
    assert {"config.json", "generation_config.json"} <= {file.name for file in copied}
    assert not any(file.suffix == ".safetensors" for file in copied)
    args = config.model
    source = open_weights(args)
    web.sent = 0
    part = source.find("model.embed_tokens.weight")[10:20]
    assert torch.equal(part, model.model.embed_tokens.weight[10:20]) and web.sent < 40_000
    first = identify(args, load_model_spec(args)).fingerprint
    assert first == identify(args, load_model_spec(args)).fingerprint
    web.failures = 2
    assert torch.equal(source.find("model.norm.weight")[...], model.model.norm.weight)
    with pytest.raises(ConfigError, match="lacks nothing"):
        source.find("nothing")
    with pytest.raises(ConfigError, match="leave it out"):
        check_removable(args)


def test_the_tokenizer_comes_along(tmp_path, web, monkeypatch):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((CHECKPOINT / name).read_bytes())
    found = load_tokenizer(web.url, download_dir=str(tmp_path / "here"))
    assert found.encode("hello") == load_tokenizer("tinychat").encode("hello")


def test_what_cannot_be_read(tmp_path, web, monkeypatch):
    args = ModelArgs(web.url, download_dir=str(tmp_path / "here"))
    with pytest.raises(ConfigError, match="has no config.json: it is not a Hugging Face checkpoint"):
        read_config(args)
    save_model(tmp_path / "model", "Llama")
    assert read_config(args)
    web.whole = True
    with pytest.raises(ConfigError, match=r"is not served in ranges \(status 200\)"):
        open_weights(args).find("model.norm.weight")
    web.failures = 3
    with pytest.raises(ConfigError, match="Cannot read .*: status 503"):
        open_weights(args).find("model.norm.weight")
    with pytest.raises(ConfigError, match="--load-format remote reads a --model-path such as"):
        open_weights(ModelArgs("tinychat", load_format="remote"))
    for scheme, package in (("s3", "boto3"), ("redis", "redis")):
        monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
        with pytest.raises(ConfigError, match=f"needs the package {package}, which is not installed: pip install"):
            remote.open_remote(f"{scheme}://bucket/model")


def test_keys_of_redis(tmp_path, monkeypatch):
    """By a client with redis-py's methods."""
    model = save_model(tmp_path / "model", "Llama")
    stored = {f"models/a/{file.name}": file.read_bytes() for file in (tmp_path / "model").iterdir()}
    client = SimpleNamespace(get=stored.get,
                             getrange=lambda key, start, end: stored.get(key, b"")[start:end + 1])
    monkeypatch.setitem(sys.modules, "redis", SimpleNamespace(
        RedisError=RuntimeError, Redis=SimpleNamespace(from_url=lambda url: client)))
    args = ModelArgs("redis://host:6379/models/a", download_dir=str(tmp_path / "here"))
    source = open_weights(args)
    assert load_model_spec(args).num_layers == 3
    tensors = {name: tensor[...] for name, tensor, _ in source.tensors(())}
    assert all(torch.equal(tensors[name], value) for name, value in load_file(
        tmp_path / "model" / "model.safetensors").items())
    assert torch.equal(tensors["model.norm.weight"], model.model.norm.weight)
    del stored["models/a/model.safetensors"]
    with pytest.raises(ConfigError, match="lacks model.safetensors, or a part of it"):
        source.find("model.norm.weight")[...]
    remote.fetch_metadata.cache_clear()
