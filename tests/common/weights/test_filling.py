"""Loading by threads: each rank reads its share, and what does not fit is told at once."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup
from baton.common.models.registry import build_model, load_model_spec
from baton.common.weights import plain_reads
from baton.common.weights.filling import Filling
from baton.common.weights.lazy import InMemory
from baton.common.weights.loader import load_weights, silent
from baton.common.weights.slots import Slot
from baton.common.weights.source import open_weights
from baton.tests.helpers.small_models import load_runner, save_model, server_config

WIDE = {"vocab_size": 128, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2}
THREADS = '{"enable_multithread_load": true, "num_threads": 3}'


@pytest.mark.parametrize("threads", [1, 3])
def test_each_rank_reads_its_share_of_the_bytes(tmp_path, monkeypatch, threads):
    """Rows of a matrix, or parts of its rows; two ranks' weights are the model's."""
    save_model(tmp_path, "Llama", **WIDE)
    args = ModelArgs(str(tmp_path), weight_loader_disable_mmap=True)
    spec, lock, read = load_model_spec(args), threading.Lock(), [0]

    def preadv(file, buffers, offset):
        count = preadv_of_system(file, buffers, offset)
        with lock:
            read[0] += count
        return count

    preadv_of_system = os.preadv
    monkeypatch.setattr(plain_reads.os, "preadv", preadv)
    whole = load_file(tmp_path / "model.safetensors")
    for rank in range(2):
        read[0] = 0
        model = build_model(spec, Parallel(TPGroup(rank, 2)), torch.float32, torch.device("cpu"))
        slots = [*model.slots()]
        load_weights(open_weights(args), slots, silent, tied=False, num_threads=threads)
        assert read[0] == sum(slot.target.nbytes for slot in slots) < 0.55 * sum(t.nbytes for t in whole.values())
        for slot in slots:
            assert torch.equal(slot.target, slot.part_of(whole[slot.name])), slot.name


def test_all_that_does_not_fit_is_named(tmp_path):
    save_model(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    wrong = [name for name in sorted(tensors) if "norm" in name][:5]
    tensors.update({name: torch.zeros(3) for name in wrong})
    del tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load_runner(server_config(tmp_path, model_loader_extra_config=THREADS))
    assert str(error.value) == "; ".join(
        [*(f"{name} in model.safetensors has shape [3], but config.json asks for [48]" for name in wrong[:3]),
         "2 more do not fit either",
         f"the checkpoint {tmp_path} lacks lm_head.weight, model.embed_tokens.weight."])


def test_slots_are_filled_by_so_many_threads():
    """And those with a function of their own by the caller's; an error of a thread is raised."""
    meeting, names = threading.Barrier(3, timeout=20), []

    class Met(InMemory):
        def __getitem__(self, key):
            meeting.wait()
            names.append(threading.current_thread().name)
            return super().__getitem__(key)

    own = []
    with Filling(3) as filling:
        for _ in range(3):
            filling.fill(Slot("a", torch.zeros(4), (4,)), Met(torch.ones(4)))
        filling.fill(Slot("b", torch.zeros(4), (4,), load=lambda part: own.append(threading.current_thread())),
                     InMemory(torch.ones(4)))
    assert len(set(names)) == 3 and own == [threading.main_thread()] and filling.num_values == 16
    with pytest.raises(RuntimeError, match="size of tensor"), Filling(2) as filling:
        filling.fill(Slot("a", torch.zeros(4), (4,)), InMemory(torch.ones(3)))


def test_threads_are_chosen_by_the_flag():
    def threads(**settings: str) -> tuple[int, int]:
        args = ModelArgs("tinychat", **settings)
        return args.loader_threads, args.copy_threads

    assert threads() == (0, min(4, os.cpu_count() or 1)) and threads(model_loader_extra_config=THREADS) == (3, 3)
    assert threads(model_loader_extra_config='{"enable_multithread_load": false}') == (0, 1)
