"""Two GPUs: a rank is killed while the other's GPU waits for what it would have sent, in a kernel of ours or of NCCL.
Nobody can end such a wait from within: the front kills all ranks, and memory has to be free again."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
import torch

from baton.tests.integration.harness import Server
from baton.tests.integration.test_dead_parts import Held, assert_all_gone, ranks_of, wait_running
from baton.tests.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

FLAGS = ["server", "--model-path", "tinychat", "--dtype", "bfloat16", "--attention-backend", "triton", "--tp-size", "2",
         "--mem-fraction-static", "0.25", "--log-level", "warning", "--cuda-graph-bs", "2", "8"]
SHAPES = {"peers": [], "nccl": ["--disable-custom-all-reduce"], "dp": ["--dp-size", "2", "--enable-dp-attention"]}
POOL_BYTES = 16 << 30
"""Less than what a rank's pool takes."""


def free_bytes() -> list[int]:
    return [torch.cuda.mem_get_info(index)[0] for index in range(2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_killed_rank_leaves_no_process_and_no_memory(tmp_path, shape):
    server = Server("baton.launch", [*FLAGS, *SHAPES[shape]], free_port(), tmp_path / "log").start()
    try:
        server.wait_ready(200)
        parts = psutil.Process(server.process.pid).children(recursive=True)
        held = Held(server.url, 8)
        wait_running(server, 8)
        taken = free_bytes()
        began = time.monotonic()
        ranks_of(server)[-1].send_signal(signal.SIGKILL)
        assert server.process.wait(40) == 1
        assert_all_gone(parts)
        took = time.monotonic() - began
        assert took < 10, f"{took:.1f} s"
        while any(now - then < POOL_BYTES for now, then in zip(free_bytes(), taken)):
            assert time.monotonic() - began < 10, (free_bytes(), taken)
            time.sleep(0.05)
        assert all(status == 503 for status, _ in held.join())
        print(f"{shape}: all gone after {took:.2f} s, memory free after {time.monotonic() - began:.2f} s")
    finally:
        server.kill()
