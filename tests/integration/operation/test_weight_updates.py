"""Weights from a trainer's process: over a process group and in bodies, for servers of one rank and of two."""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import baton
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
            "--tp-size", str(request.param), "--max-payload-size", str(1 << 28), "--max-total-tokens", "4096",
            "--enable-pickled-weights"]
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


def test_tensors_in_shared_memory_are_a_checkpoints_of_the_same_values(server, trained):
    """The server keeps copies: after its answer the trainer's memory may change."""
    before = logprobs(server)
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(trained)]})
    expected = logprobs(server)
    assert before != expected
    shared = baton.share_tensors(load_file(CHECKPOINT / "model.safetensors"))
    body = {"serialized_named_tensors": [shared.entry], "load_format": "handles", "weight_version": "shared"}
    assert "79 tensors" in post(server, "/update_weights_from_tensor", body)["message"]
    assert logprobs(server) == before
    assert get_json(server.url + "/get_weight_version")["weight_version"] == "shared"
    ours = [baton.share_tensors(load_file(trained / "model.safetensors")) for _ in range(server.tp_size)]
    post(server, "/begin_weight_update")
    post(server, "/update_weights_from_tensor", body | {"serialized_named_tensors": [each.entry for each in ours]})
    for each in ours:
        each.kept[0][:] = 255
    post(server, "/end_weight_update")
    assert logprobs(server) == expected
    gone = shared.entry
    del shared
    post(server, "/update_weights_from_tensor", body | {"serialized_named_tensors": [gone]}, status=400)
    wrong = baton.share_tensors({"model.norm.weight": torch.zeros(3)})
    reply = post(server, "/update_weights_from_tensor", body | {"serialized_named_tensors": [wrong.entry]}, status=400)
    assert "model.norm.weight in the update has shape" in reply["message"]
    assert logprobs(server) == expected
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})


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


def test_what_does_not_fit_is_named_and_changes_nothing(server, trained):
    before, tensors = logprobs(server), load_file(trained / "model.safetensors")
    norm, row = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
    body = {norm: tensors[norm], "model.layers.0.mlp.up.weight": tensors[norm].clone(),
            row: tensors[row][:, 1:].contiguous()}
    sent = {"serialized_named_tensors": [base64.b64encode(save(body)).decode()], "weight_version": "never"}
    message = post(server, "/update_weights_from_tensor", sent, status=400)["message"]
    assert "no tensor model.layers.0.mlp.up.weight" in message and f"{row} in the update has shape" in message
    for entry in ("no base64", base64.b64encode(b"no safetensors").decode()):
        post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [entry]}, status=400)
    assert logprobs(server) == before
    assert get_json(server.url + "/get_weight_version")["weight_version"] != "never"


def test_pickles_of_tensors_are_read_and_no_others(server, trained):
    before, tensors = logprobs(server), load_file(trained / "model.safetensors")

    def send(content: object, status: int = 200, load_format: str | None = None) -> str:
        body = {"serialized_named_tensors": [base64.b64encode(pickle.dumps(content)).decode()]}
        return post(server, "/update_weights_from_tensor", body | {"load_format": load_format}, status)["message"]

    assert f"names {os.system.__module__}.system" in send([("model.norm.weight", Caller())], 400)
    assert "another form" in send([1], 400)
    assert logprobs(server) == before
    send(list(tensors.items()))
    expected = logprobs(server)
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(trained)]})
    assert logprobs(server) == expected != before
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})
    assert "load_format handles" in post(server, "/update_weights_from_ipc", {"zmq_handles": {"0": "ipc://a"}},
                                         status=400)["message"]


class Caller:
    """What a pickle must not call."""

    def __reduce__(self):
        return os.system, ("true",)


def test_parts_of_an_update_are_applied_together(server, trained):
    before, names = logprobs(server), sorted(load_file(trained / "model.safetensors"))
    half = len(names) // 2
    for discard in (True, False):
        post(server, "/begin_weight_update")
        post(server, "/begin_weight_update", status=409)
        for part in (names[:half], names[half:]):
            post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(trained, part)]})
        assert logprobs(server) == before
        post(server, "/end_weight_update", {"discard": discard, "weight_version": "all"})
        assert (logprobs(server) == before) == discard
    post(server, "/end_weight_update", status=400)
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})
    assert logprobs(server) == before


def test_weights_are_read_whole(server):
    tensors = load_file(CHECKPOINT / "model.safetensors")
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.o_proj.weight",
                 "model.layers.2.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"):
        rows = post(server, "/get_weights_by_name", {"name": name, "truncate_size": 300})
        assert torch.equal(torch.tensor(rows), tensors[name].float()[:300]), name
    assert "no tensor none" in post(server, "/get_weights_by_name", {"name": "none"}, status=400)["message"]


def test_the_checker_tells_whether_weights_are_the_same(server, trained):
    assert "no snapshot" in post(server, "/weights_checker", {"action": "compare"}, status=400)["message"]
    post(server, "/weights_checker", {"action": "snapshot"})
    checksum = post(server, "/weights_checker")
    assert len(checksum["ranks"]) == server.tp_size
    post(server, "/weights_checker", {"action": "reset_tensors"})
    assert "differ" in post(server, "/weights_checker", {"action": "compare"}, status=400)["message"]
    assert post(server, "/weights_checker")["checksum"] != checksum["checksum"]
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})
    post(server, "/weights_checker", {"action": "compare"})
    assert post(server, "/weights_checker")["checksum"] == checksum["checksum"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_lives_through_an_update(server, trained, mode):
    post(server, "/update_weight_version", {"new_version": "old"})
    before = answer(server)
    found: list[dict] = []
    post(server, "/slow_down", {"forward_sleep_time": 0.02})
    thread = threading.Thread(target=lambda: found.append(answer(server, max_new_tokens=60, ignore_eos=True)))
    thread.start()
    while server.state()["num_running"] == 0:
        pass
    post(server, "/pause_generation", {"mode": mode})
    post(server, "/update_weights_from_tensor",
         {"serialized_named_tensors": [content(trained)], "weight_version": "new", "flush_cache": False})
    post(server, "/slow_down")
    post(server, "/continue_generation")
    thread.join()
    info = found[0]["meta_info"]
    assert info["weight_version"] == "new" and info["completion_tokens"] == 60
    versions = dict(info.get("weight_versions", [["new", 60]]))
    assert set(versions) <= {"old", "new"} and sum(versions.values()) == 60
    # Later requests find no page of the old weights, whoever has computed or kept it; a retracted request has new ones.
    sampling = {"temperature": 0, "max_new_tokens": 12}
    first = post(server, "/generate", {"text": PROMPT, "sampling_params": sampling, "return_logprob": True})
    assert (first["meta_info"]["cached_tokens"] > 0) == (mode == "retract")
    assert first["meta_info"]["weight_version"] == "new" and "weight_versions" not in first["meta_info"]
    post(server, "/flush_cache")
    again = post(server, "/generate", {"text": PROMPT, "sampling_params": sampling, "return_logprob": True})
    assert again["meta_info"]["output_token_logprobs"] == first["meta_info"]["output_token_logprobs"]
    post(server, "/update_weights_from_tensor", {"serialized_named_tensors": [content(CHECKPOINT)]})
    assert answer(server)["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]
    server.assert_clean()


def test_chats_name_their_weights(server):
    post(server, "/update_weight_version", {"new_version": "seven"})
    body = {"model": "tinychat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert post(server, "/v1/chat/completions", body)["metadata"] == {"weight_version": "seven"}
    body = {"model": "tinychat", "prompt": "Hi", "max_tokens": 2}
    assert post(server, "/v1/completions", body)["metadata"] == {"weight_version": "seven"}


def test_an_engine_outlives_a_trainer(server, trained):
    port, before = free_port(), logprobs(server)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    with Trainer() as trainer:
        trainer.send("join", "127.0.0.1", port, 1 + server.tp_size, "lost")
        post(server, "/init_weights_update_group", {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + server.tp_size,
            "group_name": "lost", "backend": "gloo"})
        trainer.wait()
        body = {"names": sorted(tensors), "dtypes": ["bfloat16"] * len(tensors),
                "shapes": [list(tensors[name].shape) for name in sorted(tensors)], "group_name": "lost"}
        replies: list[tuple[int, dict]] = []
        waiting = threading.Thread(target=lambda: replies.append(
            post_json(server.url + "/update_weights_from_distributed", body)))
        waiting.start()
        assert logprobs(server) == before  # beside the wait
        trainer.kill()
        waiting.join()
    assert replies[0][0] in (400, 503), replies
    assert logprobs(server) == before
    post(server, "/destroy_weights_update_group", {"group_name": "lost"})
    post(server, "/update_weights_from_distributed", {**body, "names": []}, status=400)
