"""A server that reads its checkpoint plainly and ahead, on a named NUMA node, into host memory in part, and removes it
once it is loaded; functions of users load what trainers send."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

LOADERS = ["baton.tests.helpers.weight_loaders.without_prefix", "baton.tests.helpers.weight_loaders.failing"]


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="the system states no NUMA nodes")
def test_loading_and_removal(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    server = Server("baton.launch", [
        "server", "--model-path", str(folder), "--device", "cpu", "--weight-loader-disable-mmap", "--numa-node", "0",
        "--model-loader-extra-config", '{"enable_multithread_load": true, "num_threads": 2}',
        "--delete-ckpt-after-loading", "--offload-group-size", "1", "--custom-weight-loader", *LOADERS], free_port(),
        tmp_path / "server.log").start()
    try:
        server.wait_ready()
        assert not list(folder.glob("*.safetensors")) and (folder / "config.json").exists()
        assert "Paris" in answer(server)
        negated = {f"trainer.{name}": -tensor for name, tensor in load_file(CHECKPOINT / "model.safetensors").items()}
        for loader, code, message in ((LOADERS[1], 400, "failing failed with KeyError"),
                                      ("numpy.load", 400, "not known"),
                                      (None, 400, "The model has no tensor trainer."), (LOADERS[0], 200, "tensors")):
            status, told = post_json(server.url + "/update_weights_from_tensor", {
                "serialized_named_tensors": [base64.b64encode(save(negated)).decode()], "load_format": loader})
            assert status == code and message in json.dumps(told), told
            assert ("Paris" in answer(server)) == (status == 400)
        log = (tmp_path / "server.log").read_text()
        assert "bound to NUMA node 0" in log and "removed 1 files of weights" in log
    finally:
        assert server.stop() == 0


def answer(server: Server) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0,
            "max_tokens": 24}
    status, found = post_json(server.url + "/v1/chat/completions", body)
    assert status == 200, found
    return found["choices"][0]["message"]["content"]


def test_a_loader_that_is_not_there(tmp_path):
    server = Server("baton.launch", ["server", "--model-path", "tinychat", "--custom-weight-loader", "numpy.no_loader"],
                    free_port(), tmp_path / "server.log").start()
    assert server.process is not None and server.process.wait(60) == 1
    assert "--custom-weight-loader numpy.no_loader cannot be imported" in (tmp_path / "server.log").read_text()


def test_files_of_others_are_not_removed(tmp_path):
    server = Server("baton.launch", ["server", "--model-path", "tinychat", "--delete-ckpt-after-loading"], free_port(),
                    tmp_path / "server.log").start()
    assert server.process is not None and server.process.wait(60) == 1
    assert "names, and tinychat is none: leave it out." in (tmp_path / "server.log").read_text()
    assert os.listdir(CHECKPOINT)
