"""Memory that a server gives back is free for others, and its CUDA graphs hold when it came back."""

from __future__ import annotations

import pytest
import torch

from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / "server.log"
    server = Server("baton.launch", ["server", "--model-path", "tinychat", "--max-total-tokens", "2000000",
                                     "--cuda-graph-max-bs", "8"], free_port(), log).start()
    yield server.wait_ready(180)
    server.stop(30)


def answer(server: Server) -> list[str]:
    body = {"text": ["The capital of France", "Once upon a time", "1 2 3 4"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}}
    status, answers = post_json(server.url + "/generate", body)
    assert status == 200, answers
    return [each["text"] for each in answers]


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["weights", "kv_cache"]], ids="+".join)
def test_answers_are_the_same_afterwards(server, tags):
    expected = answer(server)
    before = torch.cuda.mem_get_info()[0]
    status, told = post_json(server.url + "/release_memory_occupation", {"tags": tags})
    assert status == 200, told
    if "kv_cache" in tags:
        assert torch.cuda.mem_get_info()[0] - before > 1024 * MIB
    status, told = post_json(server.url + "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
    assert status == 503 and "resume_memory_occupation" in told["error"]["message"]
    assert post_json(server.url + "/resume_memory_occupation", {"tags": tags})[0] == 200
    assert answer(server) == expected
    assert answer(server) == expected
