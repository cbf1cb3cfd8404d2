"""DeepSeek through the engine, and over tensor-parallel ranks: greedy tokens and logits are transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.tests.common.distributed.test_dp import alone, make_prompts, run_groups
from baton.tests.common.distributed.test_moe_ranks import MOE_RANK
from baton.tests.helpers.deepseek_models import YARN, save_deepseek
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import expected_logits

NEW_TOKENS = 10


def greedy(model, prompt: list[int]) -> list[int]:
    """Of the model without a cache, and whatever it takes for an end."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(expected_logits(model, np.array(tokens))[-1].argmax()))
    return tokens[len(prompt):]


@pytest.mark.parametrize("version", [2, 3])
def test_greedy_tokens_equal_transformers(tmp_path, version):
    """Chunked prompts of which some share a prefix, twice: the second time over the prefix cache. The pool is too small
    for all at once, so that some are retracted and computed again."""
    model = save_deepseek(tmp_path, version, rope_parameters=YARN)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 131, 33).tolist()
    prompts = [rng.integers(0, 131, int(n)).tolist() for n in (1, 17, 70, 5)]
    prompts += [shared + rng.integers(0, 131, n).tolist() for n in (3, 20)]
    want = {str(i): greedy(model, prompt) for i, prompt in enumerate(prompts)}
    engine = Engine(tmp_path, chunk=19, max_total_tokens=200)
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            engine.start(str(i), prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert tokens_of(engine.run()) == want
    assert engine.scheduler.batcher.retraction.num_retracted > 0 and engine.cache.num_cached > 0


def test_two_ranks_equal_transformers(tmp_path):
    """Half of the heads each, and the experts cut, whole, or sent tokens; every rank has all latents."""
    models = {"v2": save_deepseek(tmp_path / "models" / "v2", 2),
              "v3": save_deepseek(tmp_path / "models" / "v3", 3, rope_parameters=YARN)}
    ranks = run_ranks(MOE_RANK, 2, tmp_path, str(tmp_path / "models"))
    tokens = np.random.default_rng(2).integers(0, 97, 30)
    want = {name: expected_logits(model, tokens) for name, model in models.items()}
    for rank in ranks:
        assert len(rank["logits"]) == 6
        for (name, _), logits in rank["logits"].items():
            torch.testing.assert_close(logits, want[name], atol=1e-4, rtol=0)


def test_data_parallel_attention(tmp_path):
    """Each rank has latents of its own requests alone, all heads, and half of the experts."""
    save_deepseek(tmp_path / "model", 3)
    prompts = make_prompts(1)
    ranks = run_groups(2, tmp_path, [{"checkpoint": str(tmp_path / "model"), "prompts": prompts, "chunk": 16}])
    for seen, own in zip(ranks, prompts):
        assert seen["cases"][0]["tokens"] == alone(tmp_path / "model", own)
