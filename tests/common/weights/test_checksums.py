"""Comparison of a checkpoint's files with sums of a file, and of the hub."""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.weights.checksums import verify_checkpoint


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights" * 1000)
    (made / "config.json").write_text("{}")
    return made


def sums_of(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def verify(folder, source):
    shares = []
    verify_checkpoint(ModelArgs(model_path=str(folder), model_checksum=source), folder, shares.append)
    return shares


@pytest.mark.parametrize("form", [lambda sums: {"checksums": sums}, lambda sums: sums], ids=["SGLang's", "plain"])
def test_a_list_of_sums(tmp_path, folder, form):
    sums, file = sums_of(folder), tmp_path / "sums.json"
    file.write_text(json.dumps(form(sums)))
    assert verify(folder, str(file)) == [0.5, 1.0]
    (folder / "model.safetensors").write_bytes(b"weighty" * 1000)
    with pytest.raises(ConfigError, match="model.safetensors is not the file of"):
        verify(folder, str(file))
    file.write_text(json.dumps(form(sums | {"other.safetensors": "0"})))
    with pytest.raises(ConfigError, match="names files that .* does not have: other.safetensors"):
        verify(folder, str(file))


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 1}'])
def test_what_is_no_list(tmp_path, folder, content):
    (tmp_path / "sums.json").write_text(content)
    with pytest.raises(ConfigError, match="must be a JSON file as"):
        verify(folder, str(tmp_path / "sums.json"))


def test_sums_of_the_hub(monkeypatch, folder):
    """Large files have SHA-256 sums there, others the names that git gives blobs; not all are downloaded."""
    asked = []

    def model_info(self, name, revision, files_metadata):
        asked.append((name, revision))
        blob = hashlib.sha1(b"blob 2\0{}").hexdigest()
        return SimpleNamespace(siblings=[
            SimpleNamespace(rfilename="model.safetensors", blob_id="x",
                            lfs=SimpleNamespace(sha256=sums_of(folder)["model.safetensors"])),
            SimpleNamespace(rfilename="config.json", blob_id=blob, lfs=None),
            SimpleNamespace(rfilename="README.md", blob_id="y", lfs=None)])

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=type("HfApi", (), {
        "model_info": model_info})))
    args = ModelArgs(model_path="a/b", revision="c", model_checksum="")
    verify_checkpoint(args, folder, lambda share: None)
    assert verify(folder, "d/e") == [0.5, 1.0] and asked == [("a/b", "c"), ("d/e", None)]
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="config.json is not the file of --model-checksum a/b"):
        verify_checkpoint(args, folder, lambda share: None)


def test_nothing_is_read_without_the_flag(tmp_path):
    verify_checkpoint(ModelArgs(model_path="x"), tmp_path / "missing", lambda share: None)
