"""A family that user code registers in one file is served by the unified engine and by a pair, with equal tokens."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from baton.common.config.server import ModelArgs
from baton.tests.helpers import nemotron_family
from baton.tests.helpers.nemotron_models import save_nemotron
from baton.tests.helpers.plugins import install_plugin
from baton.tests.helpers.small_models import greedy
from baton.tests.integration.transfer import test_relay_in_process
from baton.tests.integration.transfer.test_deepseek_relay import check_servers, make_unified, pair_equal_to_unified
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
    save_nemotron(tmp_path, "NemotronForCausalLM", vocab_size=VOCAB, eos_token_id=None)
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 31, 68)]
    with pair_equal_to_unified(tmp_path, prompts, bootstrap_port, "fake") as (prefill, _):
        assert prefill.scheduler.sender.counters["kv_bytes_sent"] > 0


def install(folder: Path) -> dict[str, str]:
    """Installs the family's file as a package with an entry point; returns the environment that finds it."""
    shutil.copy(nemotron_family.__file__, folder / "nemotron_family.py")
    path = install_plugin(folder, "baton.models", "OwnNemotronForCausalLM", "nemotron_family")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}


@pytest.mark.slow
def test_installed_family_is_known_to_every_process(tmp_path):
    """API servers and ranks of a unified server and of a pair, which only have the entry point."""
    model = tmp_path / "model"
    save_nemotron(model, vocab_size=4096, eos_token_id=2)
    check_servers(tmp_path, model, 1, 1, **install(tmp_path))
