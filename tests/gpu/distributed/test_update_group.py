"""Weights over NCCL: a trainer on the first GPU, and a server on the second."""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from baton.common.distributed.update_group import join_update_group
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.fixture
def server(tmp_path: Path):
    argv = ["server", "--model-path", "tinychat", "--device", "cuda", "--base-gpu-id", "1",
            "--max-total-tokens", "4096", "--mem-fraction-static", "0.1",
            "--attention-backend", "triton", "--cuda-graph-max-bs", "2"]
    server = Server("baton.launch", argv, free_port(), tmp_path / "server.log").start()
    try:
        server.wait_ready()
        yield server
        server.assert_clean()
        assert server.stop() == 0, repr(server)
    finally:
        server.kill()


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    status, reply = post_json(server.url + path, body)
    assert status == 200, reply
    return reply


def beside(server: Server, path: str, **body: Any) -> threading.Thread:
    """Posts in a thread: the answer comes once the trainer has done its part."""
    thread = threading.Thread(target=post, args=(server, path), kwargs=body)
    thread.start()
    return thread


def logprobs(server: Server) -> list[float]:
    found = post(server, "/generate", text="What is the capital of France?", return_logprob=True,
                 sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})
    return [value for value, *_ in found["meta_info"]["output_token_logprobs"]]


def changed(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape))).to(tensor.dtype)
            for name, tensor in load_file(CHECKPOINT / "model.safetensors").items()}


def test_a_group_sends_what_a_body_sends(server: Server):
    """Tensor by tensor and as one bucket; graphs that were captured before compute with what came."""
    port, before = free_port(), logprobs(server)
    joining = beside(server, "/init_weights_update_group", master_address="127.0.0.1", master_port=port, rank_offset=1,
                     world_size=2, group_name="policy", backend="nccl")
    group = join_update_group("nccl", "127.0.0.1", port, 0, 2, "policy", device="cuda:0", timeout=120)
    joining.join()
    for seed, load_format in ((1, None), (2, "flattened_bucket")):
        tensors = changed(seed)
        post(server, "/update_weights_from_tensor",
             serialized_named_tensors=[base64.b64encode(save(tensors)).decode()])
        expected = logprobs(server)
        assert expected != before
        post(server, "/update_weights_from_disk", model_path="tinychat")
        assert logprobs(server) == before
        on_gpu = [tensor.to("cuda:0") for tensor in tensors.values()]
        sending = beside(server, "/update_weights_from_distributed", names=list(tensors), group_name="policy",
                         dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in on_gpu],
                         shapes=[list(tensor.shape) for tensor in on_gpu], load_format=load_format)
        for part in on_gpu if load_format is None else [
                torch.cat([tensor.flatten().view(torch.uint8) for tensor in on_gpu])]:
            group.broadcast(part)
        sending.join()
        assert logprobs(server) == expected
    post(server, "/destroy_weights_update_group", group_name="policy")
    group.close()
