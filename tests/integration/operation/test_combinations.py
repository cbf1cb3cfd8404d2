"""Features of servers together: processes of tokenizers and detection of NaN in a pair; grammars of llguidance, drafts
of EAGLE-3, two ranks, layers in host memory and weights from a trainer in one server."""

from __future__ import annotations

import base64
import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.json_schemas import BY_HAND
from baton.tests.helpers.ports import free_ports

FAULTY_TOKEN = 3000
PROMPTS = ["What is the capital of France?", "Once upon a time there was", "1 2 3 4", "My name is"]
LONG = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Path:
    """The shipped model, of which one token's embedding is NaN; its head has copies of all."""
    folder = tmp_path_factory.mktemp("faulty")
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][FAULTY_TOKEN] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory, faulty) -> Iterator[Cluster]:
    flags = ["--model-path", str(faulty), "--tokenizer-worker-num", "2", "--enable-nan-detection"]
    with Cluster(tmp_path_factory.mktemp("pair"), flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    port, meeting = free_ports(2)
    flags = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", "--tp-size", "2",
             "--dist-init-addr", f"127.0.0.1:{meeting}", "--offload-group-size", "2", "--grammar-backend", "llguidance",
             "--constrained-json-disable-any-whitespace",
             "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "tinychat-eagle3",
             "--max-payload-size", str(1 << 28)]
    server = Server("baton.launch", flags, port, tmp_path_factory.mktemp("server") / "log").start()
    server.meeting = meeting
    try:
        yield server.wait_ready()
        server.assert_clean()
        assert server.stop() == 0, repr(server)
    finally:
        server.kill()


def generate(url: str, prompt: str | list[int], **sampling: Any) -> tuple[int, dict[str, Any]]:
    body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": LONG | sampling}
    return post_json(url + "/generate", body)


def texts(url: str) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = list(threads.map(lambda prompt: generate(url, prompt), PROMPTS))
    assert [status for status, _ in found] == [200] * len(found), found
    return [answer["text"] for _, answer in found]


def stream_events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(url + "/generate", json.dumps(body | {"stream": True}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def counter(server: Server, start: str) -> float:
    """The sum of a server's counters whose names and labels start so."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        return sum(float(line.rpartition(" ")[2]) for line in answer.read().decode().splitlines()
                   if line.startswith(start))


# ---------------------------------------------------------------------- a pair


def test_a_pair_with_processes_of_tokenizers(pair):
    alone = texts(pair.url)
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda number: generate(pair.url, PROMPTS[number % len(PROMPTS)]), range(24)))
    assert [answer["text"] for _, answer in found] == alone * 6
    events = stream_events(pair.url, {"text": PROMPTS[0], "sampling_params": LONG})
    assert events[-1]["text"] == alone[0] and len(events) > 2
    for server in pair.workers:
        assert len(tokenizer_processes(server)) == 2
        server.assert_clean()


def tokenizer_processes(server: Server) -> list[psutil.Process]:
    """Those that listen on the server's port."""
    port = int(server.url.rpartition(":")[2])
    return [process for process in psutil.Process(server.process.pid).children(recursive=True)
            if any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections())]


def test_requests_whose_logits_are_not_finite_fail_alone(pair):
    """In the prompt's step prefill finds them, in a later one decode; others beside them are answered."""
    expected = texts(pair.url)
    bias = {"logit_bias": {str(FAULTY_TOKEN): 100.0}}
    before = [counter(server, "baton:engine_non_finite_requests_total") for server in pair.workers]
    with ThreadPoolExecutor(8) as threads:
        prompts = [threads.submit(generate, pair.url, [5, FAULTY_TOKEN, 7]) for _ in range(2)]
        chosen = [threads.submit(generate, pair.url, PROMPTS[0], **bias) for _ in range(2)]
        assert texts(pair.url) == expected
        failed = [each.result() for each in (*prompts, *chosen)]
    assert [(status, answer["error"]["code"]) for status, answer in failed] == [(500, "non_finite_logits")] * 4
    sampled = {"temperature": 0.7}  # which no other worker could continue
    *_, last = stream_events(pair.url, {"text": PROMPTS[0], "sampling_params": LONG | bias | sampled})
    assert last["error"]["code"] == "non_finite_logits"
    assert [counter(server, "baton:engine_non_finite_requests_total") - count
            for server, count in zip(pair.workers, before)] == [2, 3]
    for server in pair.workers:
        server.assert_clean()


def test_requests_outlive_a_process_of_tokenizers(pair):
    expected = texts(pair.url)
    process = tokenizer_processes(pair.decode[0])[0]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(generate, pair.url, PROMPTS[number % len(PROMPTS)]) for number in range(8)]
        process.kill()
        found = [each.result() for each in asked]
    assert [status for status, _ in found] == [200] * 8, found
    assert [answer["text"] for _, answer in found] == expected * 2
    deadline = time.monotonic() + 60
    while len(tokenizer_processes(pair.decode[0])) < 2:
        assert time.monotonic() < deadline, repr(pair.decode[0])
        time.sleep(0.1)
    pair.decode[0].assert_clean()


# ---------------------------------------------------------------------- one server


def test_two_ranks_with_drafts_and_layers_in_host_memory(server, pair):
    """They answer as servers without."""
    assert texts(server.url) == texts(pair.url)
    listening = [each.laddr.port for process in psutil.Process(server.process.pid).children(recursive=True)
                 for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    assert server.meeting in listening, "the ranks meet at --dist-init-addr"


def test_grammars_with_drafts_on_two_ranks(server):
    names = ["flat", "array of objects", "tuple"]
    with ThreadPoolExecutor(len(names)) as threads:
        found = list(threads.map(lambda name: generate(server.url, "The answer is", json_schema=BY_HAND[name],
                                                       max_new_tokens=150, ignore_eos=False), names))
    for name, (status, answer) in zip(names, found):
        assert status == 200 and answer["meta_info"]["finish_reason"]["type"] == "stop", answer
        jsonschema.validate(json.loads(answer["text"]), BY_HAND[name])
        assert answer["meta_info"]["spec_verify_ct"] < answer["meta_info"]["completion_tokens"]


def test_weights_from_a_trainer_reach_layers_in_host_memory(server, tmp_path):
    torch.manual_seed(7)
    trained = {name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape))).to(tensor.dtype)
               for name, tensor in load_file(CHECKPOINT / "model.safetensors").items()}
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    save_file(trained, tmp_path / "model.safetensors", {"format": "pt"})
    before = texts(server.url)
    update(server, "/update_weights_from_disk", model_path=str(tmp_path))
    expected = texts(server.url)
    update(server, "/update_weights_from_disk", model_path=str(CHECKPOINT))
    assert texts(server.url) == before != expected
    for tensors, answers in ((trained, expected), (load_file(CHECKPOINT / "model.safetensors"), before)):
        content = base64.b64encode(save(tensors)).decode()
        update(server, "/update_weights_from_tensor", serialized_named_tensors=[content])
        assert texts(server.url) == answers


def update(server: Server, path: str, **body: Any) -> None:
    status, told = post_json(server.url + path, body)
    assert status == 200 and told["success"], told
