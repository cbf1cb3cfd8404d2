"""Fingerprints of checkpoints: what makes them equal, and what tells them apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.models.registry import load_model_spec
from baton.common.tinychat import CHECKPOINT
from baton.common.weights import samples
from baton.common.weights.fingerprint import identify


def of(path: str | Path = "tinychat", **args: object) -> str:
    given = ModelArgs(str(path), **args)
    return identify(given, load_model_spec(given)).fingerprint


@pytest.fixture
def copy(tmp_path):
    """Makes a copy of the shipped model whose tensors a function may change."""
    def make(change=lambda tensors: tensors, config=lambda config: config):
        folder = Path(shutil.copytree(CHECKPOINT, tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"))
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
        found = config(json.loads((folder / "config.json").read_text()))
        (folder / "config.json").write_text(json.dumps(found))
        return folder
    return make


def test_a_copy_is_the_same_model(copy):
    assert of(copy()) == of()


def test_how_a_copy_is_cut_into_files_does_not_matter(copy):
    folder = copy()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert of(folder) == of()


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("row", [0, -1])
def test_other_weights_are_another_model(copy, name, row):
    def change(tensors):
        tensors[name][row] += 1.0
        return tensors
    assert of(copy(change)) != of()


def test_other_rotations_are_another_model(copy):
    assert of(copy(config=lambda config: {**config, "rope_theta": 123.0, "rope_parameters": None})) != of()


@pytest.mark.parametrize("args", [{"dtype": "bfloat16"}, {"quantization": "fp8"}, {"context_length": 64},
                                  {"random_seed": 5}])
def test_how_a_server_runs_a_model_does_not_matter(args):
    assert of(**args) == of()


def test_what_an_api_does_does_not_matter(copy):
    assert of(copy(config=lambda config: {**config, "eos_token_id": 7, "transformers_version": "9"})) == of()


def test_dummy_weights_are_known_by_their_seed():
    seeds = [of(load_format="dummy", random_seed=seed) for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2] and seeds[0] != of()


def test_an_operator_may_say_that_two_checkpoints_are_as_good_as_one(copy):
    folder = copy(lambda tensors: {name: value + 1 for name, value in tensors.items()})
    assert of(folder, model_fingerprint="ours") == of(model_fingerprint="ours") == "ours"


def test_of_very_many_tensors_some_of_each_kind_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(samples, "MAX_TENSORS", 12)
    spec = load_model_spec(ModelArgs("tinychat"))
    tensors = {f"model.layers.{layer}.{part}.weight": torch.zeros(4, 4) for layer in range(30) for part in "abc"}
    tensors["model.norm.weight"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    before = identify(ModelArgs(str(tmp_path)), spec)
    sampled = samples._select(samples._tensors(tmp_path, lambda name: False))
    assert len(sampled) <= 12
    assert {tensor.name.split(".")[-2] for tensor in sampled} == {"a", "b", "c", "norm"}
    for name in ("model.norm.weight", *(f"model.layers.{layer}.b.weight" for layer in range(30))):
        tensors[name] += 1  # as a projection that was trained in every layer
    save_file(tensors, tmp_path / "model.safetensors")
    assert identify(ModelArgs(str(tmp_path)), spec).fingerprint != before.fingerprint


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]",
                                     b"\x09\0\0\0\0\0\0\0{\"a\": {}}"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    spec = load_model_spec(ModelArgs("tinychat"))
    with pytest.raises(ConfigError, match=r"Cannot read .*model\.safetensors"):
        identify(ModelArgs(str(tmp_path)), spec)
