"""A family that user code registers in one file is served by the unified engine and by a pair, with equal tokens."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from baton.common.config.server import ModelArgs
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers import nemotron_family
from baton.tests.helpers.harness import Server
from baton.tests.helpers.nemotron_models import save_nemotron
from baton.tests.helpers.ports import free_ports
from baton.tests.helpers.small_models import greedy
from baton.tests.integration.transfer import test_relay_in_process
from baton.tests.integration.transfer.test_deepseek_relay import answers, make_unified, pair_equal_to_unified
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, Side, bootstrap_port, run, tokens_of

__all__ = ["bootstrap_port"]


def test_tokens_of_the_unified_engine_and_of_a_pair_are_transformers_own(tmp_path, bootstrap_port):  # noqa: F811
    model = save_nemotron(tmp_path, vocab_size=VOCAB, eos_token_id=None)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in (1, 5, 31, 47, 68)]
    unified = Side(tmp_path, make_unified, "null", 0, "fake")
    for i, prompt in enumerate(prompts):
        unified.start(str(i), prompt)
    run(unified)
    assert tokens_of(unified.take()[0]) == {str(i): greedy(model, prompt, 12) for i, prompt in enumerate(prompts)}
    with pair_equal_to_unified(tmp_path, prompts, bootstrap_port, "fake") as (prefill, _):
        assert prefill.scheduler.sender.counters["kv_bytes_sent"] > 0


def test_pair_that_computes_by_transformers_own_code(tmp_path, bootstrap_port, monkeypatch):  # noqa: F811
    """Pages of a layer group travel once transformers has computed its layers."""
    monkeypatch.setattr(test_relay_in_process, "ModelArgs", partial(ModelArgs, model_impl="transformers"))
    save_nemotron(tmp_path, vocab_size=VOCAB, eos_token_id=None)
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 31, 68)]
    with pair_equal_to_unified(tmp_path, prompts, bootstrap_port, "fake") as (prefill, _):
        assert prefill.scheduler.sender.counters["kv_bytes_sent"] > 0


def install(folder: Path) -> dict[str, str]:
    """Installs the family's file as a package with an entry point; returns the environment that finds it."""
    shutil.copy(nemotron_family.__file__, folder / "nemotron_family.py")
    about = folder / "nemotron_family-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nemotron-family\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[baton.models]\nNemotronForCausalLM = nemotron_family\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


@pytest.mark.slow
def test_installed_family_is_known_to_every_process(tmp_path):
    """API servers and ranks of a unified server and of a pair, which only have the entry point."""
    model = tmp_path / "model"
    save_nemotron(model, vocab_size=4096, eos_token_id=2)
    for file in Path(CHECKPOINT).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, model)
    environment, ports = install(tmp_path), free_ports(5)
    common = ["--model-path", str(model), "--device", "cpu", "--log-level", "warning", "--chunked-prefill-size", "32"]
    alone = Server("baton.launch", ["server", *common], ports[0], tmp_path / "alone.log", **environment)
    prefill = Server("baton.prefill.launch", [*common, "--disaggregation-bootstrap-port", str(ports[1])], ports[2],
                     tmp_path / "prefill.log", **environment)
    decode = Server("baton.decode.launch", common, ports[3], tmp_path / "decode.log", **environment)
    router = Server("baton.router.launch", ["--pd-disaggregation", "--prefill", prefill.url, str(ports[1]), "--decode",
                                            decode.url, "--log-level", "warning"], ports[4], tmp_path / "router.log")
    with contextlib.ExitStack() as stack:
        for server in (alone, prefill, decode, router):
            stack.callback(server.start().kill)
        for server in (alone, prefill, decode, router):
            server.wait_ready()
        expected = answers(alone)
        assert len(set(expected)) == 4 and answers(router) == expected
        prefill.assert_clean()
        decode.assert_clean()
