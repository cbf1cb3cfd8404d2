"""A prefill and a decode server on GPUs, over each way that pages travel: answers are those of one engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.harness import Cluster, post_json

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (5, 200, 64, 33, 150, 400, 17)
SAMPLING = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


def alone(prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(CHECKPOINT, device="cuda:0", page_size=16, max_total_tokens=16384, overlap=True)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, **SAMPLING)
    tokens = tokens_of(engine.run())
    return [tokens[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("backend", ["ipc", "nixl"])
def test_answers_are_one_engine_s(tmp_path, backend):
    """In CUDA graphs and with overlap, as servers run; the second time from the prefix caches."""
    prompts = [[(7 * i * j + 3 * j) % 300 + 20 for j in range(length)] for i, length in enumerate(LENGTHS)]
    prompts.append(prompts[5] + prompts[1])  # begins with what the caches have
    wanted = alone(prompts)
    flags = ["--device", "cuda", "--dtype", "float32", "--max-total-tokens", "16384", "--cuda-graph-max-bs", "8",
             "--disaggregation-transfer-backend", backend, "--kv-checksum", "full"]
    decode_flags = ["--base-gpu-id", "1"] if torch.cuda.device_count() > 1 else []
    with Cluster(tmp_path, flags=flags, prefill_flags=["--chunked-prefill-size", "128"],
                 decode_flags=decode_flags) as cluster, ThreadPoolExecutor(len(prompts)) as threads:

        def answers() -> list[list[int]]:
            told = list(threads.map(lambda prompt: post_json(
                cluster.url + "/generate", {"input_ids": prompt, "sampling_params": SAMPLING}), prompts))
            assert [status for status, _ in told] == [200] * len(prompts), told
            return [answer["output_ids"] for _, answer in told]

        assert answers() == wanted
        assert answers() == wanted
        for server in cluster.workers:
            server.assert_clean()
        assert cluster.decode[0].state()["counters"]["kv_transfers_done"] == 2 * len(prompts)
