"""How long generation pauses while a trainer replaces all weights.

    python -m baton.tests.bench.weight_updates [--model tinychat|llama-8b] [--device cpu|cuda] [--streams 4]
        [--source group|gpu-handles|host-handles] [--rounds 3] [--flattened] [--fill-gpu]

A server of one rank streams answers; this process is the trainer, and sends all weights beside the streams: begin,
send, pause in_place, end, continue. The ``group`` is a process group (with ``cuda`` the trainer is on the first GPU,
the server on the second); handles are those of ``baton.share_tensors``, of memory of the server's GPU or of the host.
With ``--fill-gpu`` the trainer takes the GPU's free memory: the server stages weights in host memory.
Prints of each round the bytes, the seconds of receiving, of the copy between two steps as the server reports it, from
pause to continue, and the longest gap between two events of a stream around the pause and while weights are received,
beside the median gap.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import baton
from baton.common.distributed.update_group import UpdateGroup, join_update_group
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}


def llama_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden],
              "lm_head.weight": [vocab, hidden]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{kind}_proj.weight": [rows, hidden]
                   for kind, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))}
        shapes |= {f"{at}.mlp.gate_proj.weight": [inner, hidden], f"{at}.mlp.up_proj.weight": [inner, hidden],
                   f"{at}.mlp.down_proj.weight": [hidden, inner], f"{at}.input_layernorm.weight": [hidden],
                   f"{at}.post_attention_layernorm.weight": [hidden]}
    return shapes


def shapes_of(model: str) -> dict[str, list[int]]:
    if model == "llama-8b":
        return llama_shapes(LLAMA_8B)
    from safetensors import safe_open

    file = Path(__file__).parents[2] / "common" / "tinychat" / "checkpoint" / "model.safetensors"
    with safe_open(file, "pt") as content:
        return {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118


class Stream(threading.Thread):
    """Streams answers, one after the other, until ``stop``; ``times`` of all events."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.stop = False
        self._url = url

    def run(self) -> None:
        body = {"input_ids": list(range(5, 69)), "stream": True,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}}
        while not self.stop:
            request = urllib.request.Request(self._url + "/generate", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                for line in answer:
                    if line.strip():
                        self.times.append(time.perf_counter())
                    if self.stop:
                        return

    def gaps(self, begin: float, end: float) -> list[float]:
        times = [at for at in list(self.times) if begin <= at <= end]
        return [after - before for before, after in zip(times, times[1:])]


def post(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    status, reply = post_json(url + path, body, timeout=600)
    assert status == 200, reply
    return reply


def join_group(url: str, device: str) -> UpdateGroup:
    backend, kind, port = ("nccl", "cuda:0", free_port()) if device == "cuda" else ("gloo", "cpu", free_port())
    joined = threading.Thread(target=post, args=(url, "/init_weights_update_group", {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": backend}))
    joined.start()
    group = join_update_group(backend, "127.0.0.1", port, 0, 2, device=kind)
    joined.join()
    return group


def weights_of(shapes: dict[str, list[int]], device: str) -> dict[str, torch.Tensor]:
    """Random values, repeated: a CPU takes minutes to draw as many as a large model has."""
    block = (torch.randn((1 << 22) + 1, device=device) * 0.02).to(torch.bfloat16)

    def values(shape: list[int]) -> torch.Tensor:
        count = math.prod(shape)
        return block.repeat(-(-count // block.numel()))[:count].view(shape)

    return {name: values(shape).clone() for name, shape in shapes.items()}


def by_group(url: str, group: UpdateGroup, tensors: dict[str, torch.Tensor], flattened: bool) -> Callable[[], object]:
    """Prepares to send tensors over the group."""
    body = {"names": list(tensors), "dtypes": ["bfloat16"] * len(tensors),
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "load_format": "flattened_bucket" if flattened else None}
    parts = list(tensors.values())
    if flattened:
        parts = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in parts])]

    def send() -> None:
        sent = threading.Thread(target=post, args=(url, "/update_weights_from_distributed", body))
        sent.start()
        for part in parts:
            group.broadcast(part)
        sent.join()

    return send


def by_handles(url: str, tensors: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Shares tensors, and prepares to send their handles."""
    shared = baton.share_tensors(tensors)
    return lambda: post(url, "/update_weights_from_tensor", {
        "serialized_named_tensors": [shared.entry], "load_format": "handles"})


def measure_round(url: str, number: int, send: Callable[[], object], streams: list[Stream]) -> None:
    time.sleep(2.0)
    begun = time.perf_counter()
    post(url, "/begin_weight_update")
    send()
    received = time.perf_counter()
    time.sleep(0.5)
    paused = time.perf_counter()
    post(url, "/pause_generation", {"mode": "in_place"})
    ended = post(url, "/end_weight_update", {"weight_version": f"step {number}"})
    post(url, "/continue_generation")
    done = time.perf_counter()
    time.sleep(1.0)

    def gaps(begin: float, end: float) -> list[float]:
        return [gap for stream in streams for gap in stream.gaps(begin, end)]

    found = re.search(r"(\d+) bytes a rank in ([\d.]+) s", ended["message"])
    assert found is not None, ended
    print(f"round {number}: {int(found[1]) / 1e9:.3f} GB, received {received - begun:.3f} s, "
          f"copied {float(found[2]):.4f} s, pause to continue {done - paused:.4f} s; "
          f"longest gap {max(gaps(received + 0.1, done + 1.0)):.4f} s at the pause, "
          f"{max(gaps(begun, received + 0.4)):.4f} s receiving, "
          f"median {statistics.median(gaps(begun - 1.0, begun)):.4f} s", flush=True)


def measure(server: Server, args: argparse.Namespace) -> None:
    url, on_gpu = server.url, args.device == "cuda" and args.source != "host-handles"
    group = join_group(url, args.device) if args.source == "group" else None
    tensors = weights_of(shapes_of(args.model), "cuda:0" if on_gpu else "cpu")
    streams = [Stream(url) for _ in range(args.streams)]
    for stream in streams:
        stream.start()
    filling = None
    if args.fill_gpu:
        time.sleep(3.0)  # the first steps allocate
        filling = torch.empty(torch.cuda.mem_get_info(0)[0] - (1 << 30), dtype=torch.uint8, device="cuda:0")
    for number in range(args.rounds):
        for tensor in tensors.values():
            tensor.neg_()
        send = by_handles(url, tensors) if group is None else by_group(url, group, tensors, args.flattened)
        measure_round(url, number, send, streams)
        del send
    del filling
    for stream in streams:
        stream.stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("tinychat", "llama-8b"), default="tinychat")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", choices=("group", "gpu-handles", "host-handles"), default="group")
    parser.add_argument("--flattened", action="store_true", help="of a group: one broadcast for all tensors")
    parser.add_argument("--fill-gpu", action="store_true", help="take the GPU's free memory")
    args = parser.parse_args()
    if args.device == "cpu" and (args.source == "gpu-handles" or args.fill_gpu):
        parser.error("gpu-handles and --fill-gpu need --device cuda")
    with tempfile.TemporaryDirectory() as folder:
        argv = ["server", "--device", args.device, "--log-level", "warning"]
        if args.model == "llama-8b":
            Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
            argv += ["--model-path", folder, "--load-format", "dummy", "--skip-tokenizer-init"]
        else:
            argv += ["--model-path", "tinychat"]
        if args.device == "cuda":
            # On one GPU the trainer's and the staged weights have room beside the server's.
            place = ["1", "--mem-fraction-static", "0.6"] if args.source == "group" else [
                "0", "--mem-fraction-static", "0.4"]
            argv += ["--base-gpu-id", *place, "--attention-backend", "triton", "--cuda-graph-max-bs", "8"]
        server = Server("baton.launch", argv, free_port(), Path(folder, "server.log")).start()
        try:
            server.wait_ready(400)
            measure(server, args)
        except BaseException:
            print(server.log.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            server.kill()


if __name__ == "__main__":
    main()
