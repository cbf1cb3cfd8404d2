"""Latents travel: a prefill and a decode scheduler of a DeepSeek model answer as a unified one does."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.common.tinychat import CHECKPOINT
from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_ports
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, Side, bootstrap_port, run, tokens_of

__all__ = ["bootstrap_port"]


def make_unified(parts):
    return UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=False)


@contextlib.contextmanager
def pair_equal_to_unified(folder: Path, prompts: list[list[int]], port: int,
                          backend: str) -> Iterator[tuple[Side, Side]]:
    """A prefill and a decode scheduler of the model in ``folder`` that have answered ``prompts`` as a unified one does,
    in chunks of 23 tokens, twice: the second time over both prefix caches."""
    unified = Side(folder, make_unified, "null", 0, backend)
    for i, prompt in enumerate(prompts):
        unified.start(str(i), prompt)
    run(unified)
    expected = tokens_of(unified.take()[0])
    assert len({tuple(tokens) for tokens in expected.values()}) == len(prompts), "the model answers all alike"

    prefill = Side(folder, make_prefill, "prefill", port, backend, chunk=23)
    decode = Side(folder, make_decode, "decode", port, backend)
    try:
        for attempt in range(2):
            for i, prompt in enumerate(prompts):
                for side in (prefill, decode):
                    side.start(str(i), prompt, room=1000 * attempt + i, port=port)
            run(prefill, decode)
            outputs, failures = decode.take()
            assert not failures and tokens_of(outputs) == expected
            assert not prefill.take()[1]
            prefill.assert_clean()
            decode.assert_clean()
        yield prefill, decode
    finally:
        prefill.scheduler.close()
        decode.scheduler.close()


@pytest.mark.parametrize("backend", ["fake", "nixl"])
def test_disaggregated_tokens_equal_unified(tmp_path, bootstrap_port, backend):  # noqa: F811 (the fixture)
    """Of two layer groups, in chunks that end within pages; the second time over both prefix caches."""
    save_deepseek(tmp_path, 3, vocab_size=VOCAB)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 70, 8)]
    with pair_equal_to_unified(tmp_path, prompts, bootstrap_port, backend) as (prefill, decode):
        layout = decode.scheduler.receiver.info.layout
        sent = prefill.scheduler.sender.counters["kv_bytes_sent"]
        assert layout.form == "latent" and layout.groups == (2, 1)
        # Whole pages the first time; then only the last ones, which no prefix cache keeps for the first decoded token.
        pages = sum(-(-len(prompt) // 4) for prompt in prompts)
        assert pages * layout.page_bytes < sent < (pages + 2 * len(prompts)) * layout.page_bytes


def answers(server: Server) -> list[str]:
    """Greedy ones of raw prompts, one longer than a chunk; the last is asked again, over the prefix caches."""
    prompts = ["What is the capital of Italy?", "Two and two are " * 20, "a", "a b c d e f g h i j k l m n o p"]
    texts = []
    for prompt in [*prompts, prompts[-1]]:
        status, answer = post_json(server.url + "/v1/completions", {
            "model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True})
        assert status == 200, answer
        texts.append(answer["choices"][0]["text"])
    return texts


@pytest.mark.slow  # the lanes of latents between unequal numbers of ranks have fast tests in tests/kvtransfer
@pytest.mark.parametrize("prefill_ranks,decode_ranks", [(2, 1), (1, 2), (2, 2)])
def test_servers_of_unequal_ranks_answer_as_one(tmp_path, prefill_ranks, decode_ranks):
    model = tmp_path / "model"
    save_deepseek(model, 3, vocab_size=4096, eos_token_id=2)
    check_servers(tmp_path, model, prefill_ranks, decode_ranks)


def check_servers(folder: Path, model: Path, prefill_ranks: int, decode_ranks: int, **environment: str) -> None:
    """A pair behind a router answers as one server does. ``model`` lacks a tokenizer; the engines' processes have the
    variables of ``environment``."""
    for file in Path(CHECKPOINT).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, model)
    ports = free_ports(5)
    common = ["--model-path", str(model), "--device", "cpu", "--log-level", "warning", "--chunked-prefill-size", "32"]
    alone = Server("baton.launch", ["server", *common], ports[0], folder / "alone.log", **environment)
    prefill = Server("baton.prefill.launch", [*common, "--tp-size", str(prefill_ranks),
                                              "--disaggregation-bootstrap-port", str(ports[1])],
                     ports[2], folder / "prefill.log", **environment)
    decode = Server("baton.decode.launch", [*common, "--tp-size", str(decode_ranks)], ports[3],
                    folder / "decode.log", **environment)
    router = Server("baton.router.launch", ["--pd-disaggregation", "--prefill", prefill.url, str(ports[1]), "--decode",
                                            decode.url, "--log-level", "warning"], ports[4], folder / "router.log")
    with contextlib.ExitStack() as stack:
        for server in (alone, prefill, decode, router):
            stack.callback(server.start().kill)
        for server in (alone, prefill, decode, router):
            server.wait_ready()
        expected = answers(alone)
        assert len(set(expected)) == 4 and answers(router) == expected
        prefill.assert_clean()
        decode.assert_clean()
