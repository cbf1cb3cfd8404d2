"""How long generation pauses while a trainer replaces all weights.

    python -m baton.tests.bench.weight_updates [--model tinychat|llama-8b] [--device cpu|cuda] [--streams 4]
        [--rounds 3] [--flattened]

A server of one rank (with ``cuda`` on the second GPU) streams answers; this process is the trainer (on the first
GPU), and sends all weights over a process group beside the streams: begin, broadcast, pause in_place, end, continue.
Prints of each round the bytes, the seconds of receiving, of the copy between two steps as the server reports it, from
pause to continue, and the longest gap between two events of a stream, beside the median gap.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

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


def measure(server: Server, model: str, device: str, rounds: int, num_streams: int, flattened: bool) -> None:
    import torch

    from baton.common.distributed.update_group import join_update_group

    backend, kind = ("nccl", "cuda:0") if device == "cuda" else ("gloo", "cpu")
    port, shapes = free_port(), shapes_of(model)
    joined = threading.Thread(target=post, args=(server.url, "/init_weights_update_group", {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": backend}))
    joined.start()
    group = join_update_group(backend, "127.0.0.1", port, 0, 2, device=kind)
    joined.join()
    streams = [Stream(server.url) for _ in range(num_streams)]
    for stream in streams:
        stream.start()
    body = {"names": list(shapes), "dtypes": ["bfloat16"] * len(shapes), "shapes": list(shapes.values()),
            "load_format": "flattened_bucket" if flattened else None}
    for number in range(rounds):
        tensors = [torch.randn(shape, device=kind, dtype=torch.bfloat16) * 0.02 for shape in shapes.values()]
        if flattened:
            tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
        time.sleep(2.0)
        begun = time.perf_counter()
        post(server.url, "/begin_weight_update")
        sent = threading.Thread(target=post, args=(server.url, "/update_weights_from_distributed", body))
        sent.start()
        for tensor in tensors:
            group.broadcast(tensor)
        sent.join()
        received = time.perf_counter()
        post(server.url, "/pause_generation", {"mode": "in_place"})
        ended = post(server.url, "/end_weight_update", {"weight_version": f"step {number}"})
        post(server.url, "/continue_generation")
        done = time.perf_counter()
        time.sleep(1.0)
        gaps = [gap for stream in streams for gap in stream.gaps(begun - 1.0, done + 1.0)]
        found = re.search(r"(\d+) bytes a rank in ([\d.]+) s", ended["message"])
        assert found is not None, ended
        print(f"round {number}: {int(found[1]) / 1e9:.3f} GB, received in {received - begun:.3f} s, copied in "
              f"{float(found[2]):.4f} s, from pause to continue {done - received:.4f} s; longest gap between events "
              f"{max(gaps):.4f} s, median {statistics.median(gaps):.4f} s", flush=True)
    for stream in streams:
        stream.stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("tinychat", "llama-8b"), default="tinychat")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flattened", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        argv = ["server", "--device", args.device, "--log-level", "warning"]
        if args.model == "llama-8b":
            Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
            argv += ["--model-path", folder, "--load-format", "dummy", "--skip-tokenizer-init"]
        else:
            argv += ["--model-path", "tinychat"]
        if args.device == "cuda":
            argv += ["--base-gpu-id", "1", "--mem-fraction-static", "0.6", "--attention-backend", "triton",
                     "--cuda-graph-max-bs", "8"]
        server = Server("baton.launch", argv, free_port(), Path(folder, "server.log")).start()
        try:
            server.wait_ready(400)
            measure(server, args.model, args.device, args.rounds, args.streams, args.flattened)
        finally:
            print(server.log.read_text()[-2000:])
            server.kill()


if __name__ == "__main__":
    main()
