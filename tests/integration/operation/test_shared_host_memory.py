"""Two ranks of a model with latents, which both have all of them, keep one copy in host memory and in the storage."""

from __future__ import annotations

import shutil
from pathlib import Path

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

from .test_tiers import HOST, STORAGE, file_options, get_json, ids

PAGE, PROMPT = 16, 200
HOST_BYTES = 2_000_000


def ask(server: Server, seed: int) -> tuple[list[int], dict[str, int]]:
    """The answer's tokens, and where those of the prompt were found."""
    status, body = post_json(server.url + "/generate", {"input_ids": ids(seed, PROMPT), "sampling_params": {
        "temperature": 0, "max_new_tokens": 8, "ignore_eos": True}})
    assert status == 200, body
    return body["output_ids"], body["meta_info"].get("cached_tokens_details") or {}


def settle(server: Server) -> None:
    """Wait until host memory and the storage have all."""
    before, now = -1, 0
    while now != before or server.state()["gauges"]["storage_pages_queued"]:
        before, now = now, server.state()["counters"]["tier_pages_stored"]


def test_two_ranks_keep_one_copy_of_latents(tmp_path):
    save_deepseek(tmp_path / "model", 3, vocab_size=4096, eos_token_id=2)
    for file in Path(CHECKPOINT).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, tmp_path / "model")
    server = Server("baton.launch", [
        "server", "--model-path", str(tmp_path / "model"), "--device", "cpu", "--log-level", "info", "--tp-size", "2",
        "--max-total-tokens", "320", "--page-size", str(PAGE), *HOST, "--hicache-size", str(HOST_BYTES / 1e9),
        "--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config",
        file_options(tmp_path / "kv")], free_port(), tmp_path / "server.log")
    server.start()
    try:
        server.wait_ready()
        pages = PROMPT // PAGE
        computed = {}
        for seed in (1, 2, 3):  # the pool holds one prompt
            computed[seed], found = ask(server, seed)
            assert not found.get("host")
        settle(server)
        for seed in (1, 2, 3, 1):
            answer, found = ask(server, seed)
            assert answer == computed[seed] and found["host"] >= (pages - 1) * PAGE, found
        settle(server)
        objects = [file for file in (tmp_path / "kv").rglob("*") if file.name.endswith(".bin")]
        assert 3 * pages <= len(objects) == get_json(server.url + STORAGE)["pages_written"]
        assert post_json(server.url + "/flush_cache")[0] == 200
        answer, found = ask(server, 2)
        assert answer == computed[2] and found["storage"] >= (pages - 1) * PAGE, found
        log = server.log.read_text()
        assert "2 ranks share" in log
        state = server.state()
        per_page = HOST_BYTES * 2 / (state["gauges"]["hicache_host_total_tokens"] / PAGE)
        stored = state["counters"]["tier_bytes_stored"] / state["counters"]["tier_pages_stored"]
        assert 0.99 < per_page / stored < 1.02, "twice as many pages as one rank's memory holds"
        server.assert_clean()
        assert server.stop() == 0
    finally:
        server.kill()
