"""The registry of load formats, and a source of weights in memory that a user registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import baton
from baton.common.api.errors import ConfigError
from baton.common.config.load_format import LOAD_FORMATS
from baton.common.config.server import ModelArgs
from baton.common.models.registry import load_model_spec
from baton.common.weights.dummy_source import DummySource
from baton.common.weights.fingerprint import identify
from baton.common.weights.lazy import InMemory
from baton.common.weights.loader import load_weights, silent
from baton.common.weights.safetensors_source import SafetensorsSource
from baton.common.weights.slots import Slot
from baton.common.weights.source import SourceTensor, open_weights
from baton.common.weights.torch_source import TorchSource
from baton.tests.helpers.small_models import expected_logits, logits_of, save_model
from baton.tests.helpers.small_moe import save_moe

TOKENS = np.arange(1, 12)


class DictSource:
    """Weights that the process has."""

    reads_checkpoint = False
    tensors_of_all: Mapping[str, torch.Tensor] = {}

    def __init__(self, args: ModelArgs):
        self.name = "in memory"

    def tensors(self, slots: object) -> Iterator[SourceTensor]:
        for name, tensor in self.tensors_of_all.items():
            yield SourceTensor(name, InMemory(tensor), "a dict")

    def find(self, name: str) -> InMemory:
        return InMemory(self.tensors_of_all[name])

    def identity(self, is_optional: object) -> bytes:
        return b"".join(tensor.numpy().tobytes() for tensor in self.tensors_of_all.values())


@pytest.fixture
def memory(monkeypatch):
    """Registers ``--load-format dict``, and returns a function that sets its weights from a checkpoint's file."""
    baton.register_load_format("dict")(DictSource)
    yield lambda tensors: monkeypatch.setattr(DictSource, "tensors_of_all", tensors)
    del LOAD_FORMATS._entries["dict"]


@pytest.mark.parametrize("save", [lambda folder: save_model(folder, "Llama"),
                                  lambda folder: save_moe(folder, "Mixtral")], ids=["dense", "experts"])
def test_weights_in_memory(tmp_path, memory, save):
    model = save(tmp_path)
    memory(load_file(tmp_path / "model.safetensors"))
    from_file = logits_of(tmp_path, TOKENS)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(logits_of(tmp_path, TOKENS, load_format="dict"), from_file)
    torch.testing.assert_close(from_file, expected_logits(model, TOKENS), atol=1e-4, rtol=0)


def test_wrong_tensors_in_memory_are_named(tmp_path, memory):
    save_model(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    memory(tensors)
    with pytest.raises(ConfigError, match=r"^The checkpoint in memory lacks model.norm.weight\.$"):
        logits_of(tmp_path, TOKENS, load_format="dict")
    memory({**tensors, "model.norm.weight": norm[:3]})
    with pytest.raises(ConfigError, match=r"model.norm.weight in a dict has shape \[3\]"):
        logits_of(tmp_path, TOKENS, load_format="dict")


def test_weights_in_memory_have_an_identity_of_their_own(tmp_path, memory):
    save_model(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    args = ModelArgs(str(tmp_path), load_format="dict")
    memory(tensors)
    found = identify(args, load_model_spec(args))
    assert found.source == f"{tmp_path} with in memory" and found == identify(args, load_model_spec(args))
    memory({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1})
    assert identify(args, load_model_spec(args)).fingerprint != found.fingerprint


def test_a_hub_checkpoint_is_downloaded_with_its_weights_where_they_are_read(monkeypatch, tmp_path):
    from baton.common.config import checkpoint

    asked = []
    monkeypatch.setattr(checkpoint, "download",
                        lambda path, revision, patterns, *rest, folder, without=(): asked.append(patterns) or tmp_path)
    for name in ("auto", "dummy", "safetensors"):
        checkpoint.resolve_checkpoint(ModelArgs("org/name", load_format=name))
    assert [checkpoint.WEIGHT_PATTERNS[0] in patterns for patterns in asked] == [False, True, False, False, True]


def test_a_tensor_is_found_in_any_file(tmp_path):
    for part in "ab":
        save_file({part: torch.full((2,), float(ord(part)))}, tmp_path / f"model-{part}.safetensors")
    source = SafetensorsSource(ModelArgs(str(tmp_path)))
    assert [source.find(part)[:].tolist() for part in "ba"] == [[98.0, 98.0], [97.0, 97.0]]
    with pytest.raises(ConfigError, match="lacks c"):
        source.find("c")
    with pytest.raises(ConfigError, match="dummy weights of seed 3 lacks c"):
        DummySource(ModelArgs("tinychat", random_seed=3)).find("c")


def test_what_shares_a_finish_is_finished_once_after_all_are_loaded(tmp_path, memory):
    values = {name: torch.full((3,), float(index)) for index, name in enumerate("abc")}
    memory(values)
    slots = [Slot(name, torch.zeros(3), (3,)) for name in values]
    seen = []

    def note() -> None:
        seen.append([slot.target[0].item() for slot in slots])

    finishing = [replace(slot, finish=note) if slot.name in "ab" else slot for slot in slots]
    load_weights(DictSource(ModelArgs("")), finishing, silent, tied=False)
    assert seen == [[0.0, 1.0, 2.0]]
    with pytest.raises(ConfigError, match="lacks d"):
        load_weights(DictSource(ModelArgs("")), [*finishing, Slot("d", torch.zeros(3), (3,))], silent, tied=False)
    assert len(seen) == 1


def test_a_checkpoint_of_torchs_own_files(tmp_path):
    """It loads as one in safetensors does, where there is none of those; files that are no tensors run no code."""
    save_model(tmp_path, "Llama")
    want, tensors = logits_of(tmp_path, TOKENS), load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    for part, content in enumerate(halves):
        torch.save(content, tmp_path / f"pytorch_model-{part}.bin")
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    assert torch.equal(logits_of(tmp_path, TOKENS), want)
    assert torch.equal(logits_of(tmp_path, TOKENS, load_format="pt"), want)
    args = ModelArgs(str(tmp_path))
    found = identify(args, load_model_spec(args))
    assert torch.equal(open_weights(args).find("model.norm.weight")[:], tensors["model.norm.weight"])
    with pytest.raises(ConfigError, match="lacks nothing"):
        open_weights(args).find("nothing")
    torch.save({**halves[1], "model.norm.weight": tensors["model.norm.weight"] + 1}, tmp_path / "pytorch_model-1.bin")
    assert identify(args, load_model_spec(args)).fingerprint != found.fingerprint
    for content, error in (([1], "it is no dictionary of tensors"), ({"a": Path}, "Cannot read")):
        torch.save(content, tmp_path / "pytorch_model-1.bin")
        with pytest.raises(ConfigError, match=error):
            logits_of(tmp_path, TOKENS)
    for file in tmp_path.glob("*.bin"):
        file.unlink()
    with pytest.raises(ConfigError, match="holds no safetensors files"):
        logits_of(tmp_path, TOKENS)
    with pytest.raises(ConfigError, match=r"holds no \.bin or \.pt files, which --load-format pt reads"):
        logits_of(tmp_path, TOKENS, load_format="pt")


def test_torchs_own_files_of_a_hub_are_downloaded_where_there_are_no_others(monkeypatch, tmp_path):
    from baton.common.config import checkpoint

    asked = []
    monkeypatch.setattr(checkpoint, "download",
                        lambda path, revision, patterns, *rest, **named: asked.append(patterns[-1]) or tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert isinstance(LOAD_FORMATS.get("auto")(ModelArgs("org/name")), TorchSource)
    assert checkpoint.PICKLED_PATTERNS[0] in asked
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    asked.clear()
    assert isinstance(LOAD_FORMATS.get("auto")(ModelArgs("org/name")), SafetensorsSource)
    assert checkpoint.PICKLED_PATTERNS[0] not in asked
