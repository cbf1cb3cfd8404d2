"""Weights as CUDA IPC handles: memory of another process on the same GPU, and where there are two on the other."""

from __future__ import annotations

import base64
import multiprocessing
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save

import baton
from baton.common.api.errors import InvalidRequest
from baton.common.tinychat import CHECKPOINT
from baton.common.weights import staging
from baton.common.weights.digest import tensor_digest
from baton.common.weights.shared_tensors import map_tensors
from baton.common.weights.slots import Slot
from baton.common.weights.uploads import upload
from baton.tests.gpu.distributed import sharing_trainer
from baton.tests.gpu.distributed.sharing_trainer import tensors_of
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONTEXT = multiprocessing.get_context("spawn")
DEVICE = torch.device("cuda", 0)


@pytest.fixture(params=[0, 1])
def trainer(request):
    if request.param >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    pipe, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=sharing_trainer.main, args=(request.param, theirs), daemon=True)
    process.start()
    yield pipe
    pipe.send(None)
    process.join(30)
    assert process.exitcode == 0


def test_tensors_of_another_process(trainer):
    for seed in (1, 2, 3):
        trainer.send(seed)
        content = base64.b64decode(trainer.recv())
        found = dict(map_tensors(content, DEVICE))
        for name, tensor in tensors_of(seed, "cpu").items():
            assert found[name].is_cuda == (name != "host")
            assert torch.equal(found[name].cpu(), tensor), (seed, name)
        del found


def test_places_beyond_an_allocation(trainer):
    trainer.send(1)
    description = msgspec.json.decode(base64.b64decode(trainer.recv()))
    memory = description["tensors"][0]["index"]
    description["tensors"][0] |= {"shape": [1 << 40], "offset": 0}
    with pytest.raises(InvalidRequest, match="of GPU memory that has"):
        map_tensors(msgspec.json.encode(description), DEVICE)
    description["memory"][memory]["handle"] = base64.b64encode(bytes(64)).decode()
    with pytest.raises(InvalidRequest, match="cannot be mapped"):
        map_tensors(msgspec.json.encode(description), DEVICE)


def test_digests_of_host_memory():
    """Of more than one chunk, at an odd address."""
    tensor = torch.randn((1 << 25) + 5).to(torch.bfloat16)[3:]
    assert torch.equal(upload(tensor, DEVICE).cpu(), tensor)
    assert tensor_digest(tensor, DEVICE) == tensor_digest(tensor) == tensor_digest(tensor.to(DEVICE))


@pytest.mark.parametrize("room", [True, False])
def test_staging_on_the_device_and_in_host_memory(monkeypatch, room):
    """What finds no room is copied from pinned memory to its target, without another copy on the device."""
    monkeypatch.setattr(staging, "_has_room", lambda device, num_bytes: room)
    sent = {"same": torch.randn(4096, 4096).to(torch.bfloat16), "wider": torch.randn(64, 32),
            "mapped": torch.randn(64, 32).to(torch.bfloat16).to(DEVICE)}
    slots = [Slot(name, torch.zeros_like(tensor, dtype=torch.bfloat16, device=DEVICE), tuple(tensor.shape))
             for name, tensor in sent.items()]
    staged = staging.Staging([staging.Destination(lambda: slots, lambda name: False)], borrowed=True)
    expected = {name: tensor.to(torch.bfloat16).cpu() for name, tensor in sent.items()}
    for name, tensor in sent.items():
        staged.add(name, tensor)
        torch.cuda.synchronize()
        tensor.zero_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    staged.apply()
    assert torch.cuda.max_memory_allocated(DEVICE) - before < 1 << 20
    for slot in slots:
        assert torch.equal(slot.target.cpu(), expected[slot.name]), slot.name


def logprobs(server: Server) -> list[float]:
    status, body = post_json(server.url + "/generate", {
        "text": "What is the capital of France?", "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}})
    assert status == 200, body
    return [value for value, *_ in body["meta_info"]["output_token_logprobs"]]


def test_a_server_takes_weights_from_this_gpu(tmp_path: Path):
    """It keeps copies, so that the trainer may change its tensors after the answer."""
    argv = ["server", "--model-path", "tinychat", "--device", "cuda", "--max-total-tokens", "4096",
            "--mem-fraction-static", "0.1", "--disable-cuda-graph"]
    server = Server("baton.launch", argv, free_port(), tmp_path / "server.log").start()
    try:
        server.wait_ready()

        def send(**body: object) -> None:
            status, reply = post_json(server.url + "/update_weights_from_tensor", body)
            assert status == 200, reply

        torch.manual_seed(7)
        tensors = {name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape))).to(tensor.dtype)
                   for name, tensor in load_file(CHECKPOINT / "model.safetensors").items()}
        before = logprobs(server)
        send(serialized_named_tensors=[base64.b64encode(save(tensors)).decode()])
        expected = logprobs(server)
        assert expected != before
        send(serialized_named_tensors=[base64.b64encode((CHECKPOINT / "model.safetensors").read_bytes()).decode()])
        on_gpu = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
        shared = baton.share_tensors(on_gpu)
        assert post_json(server.url + "/begin_weight_update", {})[0] == 200
        send(serialized_named_tensors=[shared.entry], load_format="handles")
        for tensor in on_gpu.values():
            tensor.fill_(7)
        torch.cuda.synchronize()
        assert post_json(server.url + "/end_weight_update", {})[0] == 200
        assert logprobs(server) == expected
        server.assert_clean()
        assert server.stop() == 0, repr(server)
    finally:
        server.kill()
