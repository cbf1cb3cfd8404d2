"""Deterministic servers: equal answers of one engine and of a pair, and the command that checks a server."""

from __future__ import annotations

import pytest

from baton.common.bench import deterministic
from baton.tests.helpers.harness import Cluster, Server, get_json, post_json
from baton.tests.helpers.ports import free_port

FLAGS = ("--enable-deterministic-inference", "--chunked-prefill-size", "96")
CASES = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8, "seed": 3, "n": 2}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("deterministic") / "server.log"
    flags = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", *FLAGS]
    started = Server("baton.launch", flags, free_port(), log).start()
    try:
        yield started.wait_ready()
    finally:
        started.stop()


def answers(url: str, texts: list[str], sampling: dict) -> list[tuple]:
    body = {"text": texts, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3,
            "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, **sampling}}
    status, found = post_json(url + "/generate", body)
    assert status == 200, found
    return [(one["text"], one["meta_info"]["output_token_logprobs"], one["meta_info"]["output_top_logprobs"],
             one["meta_info"]["input_token_logprobs"]) for one in found]


def test_a_pair_gives_the_bits_of_one_engine(server, tmp_path):
    """Prompts one by one on one engine, all at once on the pair."""
    texts = [deterministic.long_text(length) for length in (9, 300, 700, 701)]
    with Cluster(tmp_path, flags=FLAGS) as cluster:
        for sampling in CASES:
            alone = [answer for text in texts for answer in answers(server.url, [text], sampling)]
            assert answers(cluster.url, texts, sampling) == alone
    assert get_json(server.url + "/get_server_info")["enable_deterministic_inference"] is True


@pytest.mark.parametrize("mode", ["single", "prefix", "radix_cache"])
def test_the_command_finds_one_answer(server, capsys, mode):
    with pytest.raises(SystemExit) as exit:
        deterministic.main(["--base-url", server.url, "--test-mode", mode, "--n-trials", "3", "--n-start", "2",
                            "--max-new-tokens", "6", "--return-logprob"])
    printed = capsys.readouterr().out
    assert exit.value.code == 0 and "Unique samples: 1" in printed and "Unique samples: 2" not in printed


def test_the_command_tells_differing_answers(monkeypatch, capsys):
    texts = iter("ab" * 500)
    monkeypatch.setattr(deterministic.Control, "wait_ready", lambda self, seconds: None)
    monkeypatch.setattr(deterministic, "_ask", lambda args, prompts, **fields: [{"text": next(texts)} for _ in prompts])
    with pytest.raises(SystemExit) as exit:
        deterministic.main(["--n-trials", "2"])
    assert exit.value.code == 1 and "Total samples: 3, Unique samples: 2" in capsys.readouterr().out
