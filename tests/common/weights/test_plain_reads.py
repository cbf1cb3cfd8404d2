"""Checkpoints that are read without mapping them, and ahead; and their removal."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.weights.files import checkpoint_files
from baton.common.weights.plain_reads import OpenFile, reading_ahead
from baton.common.weights.removal import remove_weights
from baton.common.weights.safetensors_source import SafetensorsSource
from baton.common.weights.samples import read_header
from baton.tests.helpers.small_models import save_model

KEYS = [..., slice(None), slice(2, 5), slice(5, 5), slice(0, 99), (slice(1, 4), slice(2, 3)),
        (slice(None), slice(1, 3)), 3, (2, slice(None)), slice(0, 6, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64])
def test_slices_equal_mapped_ones(tmp_path, dtype):
    tensors = {"first": torch.arange(7).to(dtype), "matrix": torch.arange(42).view(6, 7).to(dtype),
               "scalar": torch.tensor(5).to(dtype), "none": torch.empty(0, 7, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    file = OpenFile(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as mapped:
        for tensor in read_header(tmp_path / "model.safetensors"):
            read, theirs = file.tensor(tensor), mapped.get_slice(tensor.name)
            assert (read.get_shape(), read.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
            assert torch.equal(read[...].float(), tensors[tensor.name].float())
            for key in KEYS if tensor.name == "matrix" else ():
                assert torch.equal(read[key].float(), tensors[tensor.name].float()[key]), key


@pytest.mark.parametrize("flags", [{"weight_loader_disable_mmap": True}, {
    "model_loader_extra_config": '{"enable_multithread_load": true, "num_threads": 3}'}], ids=lambda flags: [*flags][0])
def test_sources_have_the_same_tensors(tmp_path, flags):
    save_model(tmp_path, "Llama", shard="30KB")
    assert len(checkpoint_files(tmp_path)) > 4
    args = ModelArgs(model_path=str(tmp_path), **flags)
    found = {name: tensor[...].clone() for name, tensor, _ in SafetensorsSource(args).tensors([])}
    wanted = {name: tensor[...].clone() for name, tensor, _ in
              SafetensorsSource(ModelArgs(model_path=str(tmp_path))).tensors([])}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_file_that_ends_early(tmp_path):
    save_model(tmp_path, "Llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    source = SafetensorsSource(ModelArgs(model_path=str(tmp_path), weight_loader_disable_mmap=True))
    with pytest.raises(ConfigError, match="Cannot read .*model.safetensors: it ends within"):
        for _, tensor, _ in source.tensors([]):
            tensor[...]


def test_files_are_read_ahead(tmp_path, monkeypatch):
    """By threads, each as the loader comes to another file; no more than so many before it."""
    files = [tmp_path / str(number) for number in range(6)]
    begun, changed = [], threading.Condition()

    def read(file, stop):
        with changed:
            begun.append(file)
            changed.notify()

    monkeypatch.setattr("baton.common.weights.plain_reads._read_through", read)
    with reading_ahead(files, 2) as begin:
        for number in range(6):
            with changed:
                assert changed.wait_for(lambda: len(begun) >= min(2 + number, 6), 10)  # noqa: B023
                assert len(begun) == min(2 + number, 6)
            begin(files[number])
    assert begun == files


def test_weights_are_removed_and_nothing_else(tmp_path):
    save_model(tmp_path, "Llama", shard="30KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    remove_weights(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "generation_config.json",
                                                                "tokenizer.json"]
    remove_weights(tmp_path)  # another host of the folder was first
