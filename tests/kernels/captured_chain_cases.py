"""Chain steps whose attention plans by what is on the device alone, as when they are captured on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.api.sampling import SamplingParams
from baton.common.config.server import KernelArgs, SpeculativeArgs
from baton.common.forward import chain_batches
from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers.chain_steps import Again, Chats
from baton.tests.helpers.deepseek_models import save_with_predictors
from baton.tests.helpers.draft_models import save_eagle3
from baton.tests.helpers.hand_driven import Engine
from baton.tests.helpers.small_models import save_model

SAMPLING = [SamplingParams(temperature=0.0, max_new_tokens=90),
            SamplingParams(temperature=0.9, top_k=30, seed=4, max_new_tokens=90)]


def save_eagle(folder):
    save_eagle3(folder / "draft", save_model(folder / "model", "Qwen3", eos_token_id=None))


def save_standalone(folder):
    save_model(folder / "model", "Qwen3", eos_token_id=None)
    save_model(folder / "draft", "Qwen2", num_hidden_layers=1)


def save_latent(folder):
    (folder / "model").mkdir()
    save_with_predictors(folder / "model", 1, echo=3.0, eos_token_id=None)


@pytest.fixture
def invariant(request):
    set_batch_invariant(request.param)
    yield
    set_batch_invariant(False)


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize(("algorithm", "save", "invariant"), [
    ("STANDALONE", save_standalone, False), ("NEXTN", save_latent, False), ("EAGLE3", save_eagle, True)],
    indirect=["invariant"])
def test_no_step_reads_the_host_s_copies(tmp_path, monkeypatch, algorithm, save):
    save(tmp_path)
    draft = None if algorithm == "NEXTN" else str(tmp_path / "draft")
    engine = Engine(tmp_path / "model", max_total_tokens=512, kernels=KernelArgs(attention_backend="triton"),
                    speculative=SpeculativeArgs(speculative_algorithm=algorithm, speculative_num_steps=2,
                                                speculative_draft_model_path=draft))
    monkeypatch.setattr(chain_batches, "_host_copy", lambda tensor, on_gpu: np.zeros(on_gpu, np.int32))
    engine.runner.chain_steps.select(engine.config)
    assert engine.runner.chain_levels is not None and engine.runner.chain_levels.num_drafts == (2,)
    engine.runner.chain_steps.record({2: [3]}, Again(), lambda what, share: None)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12, 13]]
    eager, chained = (Chats(engine, prompts, SAMPLING, 2, room=60) for _ in range(2))
    for chosen in ([0, 1], [1, 0]):
        eager.eager(chosen)
        chained.chain(chosen)
    chained.synchronize()
    assert chained.outputs == eager.outputs
