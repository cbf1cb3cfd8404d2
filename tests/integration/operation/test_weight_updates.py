"""Weights from a trainer's process: over a process group and in bodies, for servers of one rank and of two."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from baton.tests.helpers.harness import Server, get_json, post_json
from baton.tests.helpers.ports import free_port
from baton.tests.helpers.trainer import Trainer

CHECKPOINT = Path(__file__).parents[3] / "common" / "tinychat" / "checkpoint"
PROMPT = "What is the capital of France? Answer in one sentence, please, and say which river it is at."


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The shipped model after a training step that has moved all of its weights."""
    folder = tmp_path_factory.mktemp("trained")
    for file in CHECKPOINT.iterdir():
        shutil.copy(file, folder)
    torch.manual_seed(7)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    save_file({name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape))).to(tensor.dtype)
               for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    argv = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", "--page-size", "16",
            "--tp-size", str(request.param), "--max-payload-size", str(1 << 28), "--max-total-tokens", "4096"]
    server = Server("baton.launch", argv, free_port(), folder / "server.log").start()
    server.tp_size = request.param
    try:
        yield server.wait_ready()
        server.assert_clean()
        assert server.stop() == 0, repr(server)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer


def answer(server: Server, **sampling: object) -> dict:
    status, body = post_json(server.url + "/generate", {
        "text": PROMPT, "return_logprob": True, "logprob_start_len": 0,
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, **sampling}})
    assert status == 200, body
    return body


def logprobs(server: Server) -> list[float]:
    info = answer(server)["meta_info"]
    return [value for value, *_ in [*info["input_token_logprobs"][1:], *info["output_token_logprobs"]]]


def content(folder: Path, names: list[str] | None = None) -> str:
    tensors = load_file(folder / "model.safetensors")
    return base64.b64encode(save({name: tensors[name] for name in names or tensors})).decode()


def post(server: Server, path: str, body: dict | None = None, status: int = 200) -> dict:
    got, reply = post_json(server.url + path, body)
    assert got == status, (got, reply)
    return reply


def test_tensors_in_the_body_are_a_checkpoints_of_the_same_values(server, trained):
    before = logprobs(server)
    post(server, "/update_weights_from_disk", {"model_path": str(trained)})
    expected = logprobs(server)
    post(server, "/update_weights_from_disk", {"model_path": str(CHECKPOINT)})
    assert logprobs(server) == before != expected
    reply = post(server, "/update_weights_from_tensor",
                 {"serialized_named_tensors": [content(trained)] * server.tp_size, "weight_version": "step 1"})
    assert reply["success"] and "79 tensors" in reply["message"]
    assert logprobs(server) == expected
    assert get_json(server.url + "/get_weight_version")["weight_version"] == "step 1"
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})
    assert logprobs(server) == before


@pytest.mark.parametrize("flattened", [False, True], ids=["one by one", "flattened"])
def test_a_trainer_broadcasts(server, trained, trainer, flattened):
    group, port = f"group {server.tp_size} {flattened}", free_port()
    trainer.send("join", "127.0.0.1", port, 1 + server.tp_size, group)
    post(server, "/init_weights_update_group", {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + server.tp_size,
        "group_name": group, "backend": "gloo"})
    trainer.wait()
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})
    before = logprobs(server)
    for folder in (trained, CHECKPOINT):
        tensors = load_file(folder / "model.safetensors")
        names = sorted(tensors)
        trainer.send("broadcast", str(folder / "model.safetensors"), names, flattened, group)
        post(server, "/update_weights_from_distributed", {
            "names": names, "dtypes": [str(tensors[name].dtype) for name in names],
            "shapes": [list(tensors[name].shape) for name in names], "group_name": group,
            "load_format": "flattened_bucket" if flattened else None, "weight_version": folder.name})
        trainer.wait()
        assert (logprobs(server) == before) == (folder == CHECKPOINT)
    post(server, "/destroy_weights_update_group", {"group_name": group})
    trainer.send("leave", group)
    trainer.wait()
    post(server, "/destroy_weights_update_group", {"group_name": group}, status=400)
