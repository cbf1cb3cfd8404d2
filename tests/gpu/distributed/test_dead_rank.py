"""Two GPUs: a rank is killed while the other's GPU waits for what it would have sent, in a kernel of ours or of NCCL.
Nobody can end such a wait from within: the front kills all ranks, and memory has to be free again."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.tests.helpers.harness import Server, get_json, post_json
from baton.tests.helpers.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

FLAGS = ["server", "--model-path", "tinychat", "--dtype", "bfloat16", "--attention-backend", "triton", "--tp-size", "2",
         "--mem-fraction-static", "0.12", "--log-level", "warning", "--cuda-graph-bs", "2", "8"]
SHAPES = {"peers": [], "nccl": ["--disable-custom-all-reduce"], "dp": ["--dp-size", "2", "--enable-dp-attention"]}
LONG = {"text": "x", "sampling_params": {"ignore_eos": True, "max_new_tokens": 3000, "temperature": 0}}
POOL_BYTES = 8 << 30
"""Less than what a rank's pool takes."""


def parents() -> dict[int, int]:
    """Of every process that is no zombie, its parent's id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            found[int(stat.parent.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    known = parents()
    found = {pid}
    while more := {child for child, parent in known.items() if parent in found} - found:
        found |= more
    return found - {pid}


def ranks_of(server: Server) -> list[int]:
    """In order."""
    assert server.process is not None
    return sorted(pid for pid in descendants(server.process.pid)
                  if b"multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_bytes())


def wait_running(server: Server, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(state["num_running"] for state in get_json(server.url + "/get_server_info")["internal_states"]) < count:
        assert time.monotonic() < deadline, repr(server)
        time.sleep(0.05)


def free_bytes() -> list[int]:
    return [torch.cuda.mem_get_info(index)[0] for index in range(2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_killed_rank_leaves_no_process_and_no_memory(tmp_path, shape):
    server = Server("baton.launch", [*FLAGS, *SHAPES[shape]], free_port(), tmp_path / "log").start()
    assert server.process is not None
    try:
        server.wait_ready(200)
        parts = descendants(server.process.pid)
        with ThreadPoolExecutor(8) as clients:
            answers = [clients.submit(post_json, server.url + "/generate", LONG) for _ in range(8)]
            wait_running(server, 8)
            taken, began = free_bytes(), time.monotonic()
            os.kill(ranks_of(server)[-1], signal.SIGKILL)
            assert server.process.wait(40) == 1
            while left := parts & set(parents()):
                assert time.monotonic() - began < 10, left
                time.sleep(0.02)
            gone = time.monotonic() - began
            while any(now - then < POOL_BYTES for now, then in zip(free_bytes(), taken)):
                assert time.monotonic() - began < 10, (free_bytes(), taken)
                time.sleep(0.05)
            print(f"{shape}: all gone after {gone:.2f} s, memory free after {time.monotonic() - began:.2f} s")
            assert [answer.result()[0] for answer in answers] == [503] * 8
    finally:
        server.kill()
