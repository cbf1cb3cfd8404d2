"""NVTX ranges of layers: a server with them gives the answers of one without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def answer(log: Path, *flags: str) -> dict[str, object]:
    argv = ["server", "--model-path", "tinychat", "--device", "cuda", "--max-total-tokens", "4096",
            "--mem-fraction-static", "0.1", "--attention-backend", "triton", "--cuda-graph-max-bs", "2", *flags]
    server = Server("baton.launch", argv, free_port(), log).start()
    try:
        server.wait_ready()
        status, body = post_json(server.url + "/generate", {
            "text": "What is the capital of France?", "return_logprob": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}})
        assert status == 200, body
        assert server.stop() == 0, repr(server)
        return {name: body["meta_info"][name] for name in ("output_token_logprobs", "prompt_tokens")}
    finally:
        server.kill()


@pytest.mark.parametrize("flags", [("--disable-cuda-graph",), ()], ids=["eager", "graphs"])
def test_ranges_change_no_answer(tmp_path, flags):
    plain = answer(tmp_path / "plain.log", *flags)
    assert answer(tmp_path / "marked.log", "--enable-layerwise-nvtx-marker", *flags) == plain
