"""A quantization format from an installed package, through real servers."""

from __future__ import annotations

import os
import shutil

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.int8_format import quantize_checkpoint, registered
from baton.tests.helpers.plugins import install_plugin
from baton.tests.helpers.ports import free_port

PROMPTS = ["The capital of France is", "Twelve and seven make", "a b c d e f g"]


def answers(url: str) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        status, answer = post_json(f"{url}/generate", {
            "text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}})
        assert status == 200, answer
        found.append(answer["output_ids"])
    return found


def test_servers_find_a_format_by_its_entry_point(tmp_path, monkeypatch):
    """One server and a prefill server quantize as they load; the decode server has a checkpoint in the format."""
    folder = install_plugin(tmp_path / "site", "baton.quantization", "toyint8",
                            "baton.tests.common.quantization.toyint8:ToyInt8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH")))))
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    with registered() as toy:
        quantize_checkpoint(tmp_path / "model", toy)
    at_load = ["--quantization", "toyint8"]
    alone = Server("baton.launch", ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning",
                                    *at_load], free_port(), tmp_path / "alone.log").start()
    try:
        expected = answers(alone.wait_ready().url)
    finally:
        alone.kill()
    same = ["--model-fingerprint", "tinychat", "--served-model-name", "tinychat"]
    with Cluster(tmp_path, flags=same, prefill_flags=at_load, decode_flags=[
            "--model-path", str(tmp_path / "model")]) as pair:
        assert answers(pair.url) == expected and len({*map(tuple, expected)}) == len(PROMPTS)
        for server in pair.workers:
            server.assert_clean()
