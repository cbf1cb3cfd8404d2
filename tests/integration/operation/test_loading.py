"""A server that reads its checkpoint plainly and ahead, on a named NUMA node, and removes it once it is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="the system states no NUMA nodes")
def test_loading_and_removal(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    server = Server("baton.launch", [
        "server", "--model-path", str(folder), "--device", "cpu", "--weight-loader-disable-mmap", "--numa-node", "0",
        "--model-loader-extra-config", '{"enable_multithread_load": true, "num_threads": 2}',
        "--delete-ckpt-after-loading"], free_port(), tmp_path / "server.log").start()
    try:
        server.wait_ready()
        assert not list(folder.glob("*.safetensors")) and (folder / "config.json").exists()
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        status, answer = post_json(server.url + "/v1/chat/completions", body)
        assert status == 200 and "Paris" in answer["choices"][0]["message"]["content"]
        log = (tmp_path / "server.log").read_text()
        assert "bound to NUMA node 0" in log and "removed 1 files of weights" in log
    finally:
        assert server.stop() == 0


def test_files_of_others_are_not_removed(tmp_path):
    server = Server("baton.launch", ["server", "--model-path", "tinychat", "--delete-ckpt-after-loading"], free_port(),
                    tmp_path / "server.log").start()
    assert server.process is not None and server.process.wait(60) == 1
    assert "names, and tinychat is none: leave it out." in (tmp_path / "server.log").read_text()
    assert os.listdir(CHECKPOINT)
