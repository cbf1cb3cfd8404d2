"""Forms of layers beyond pre-norm ones in steps of several attention groups, and what does not combine with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.distributed.parallel import Parallel
from baton.common.forward.forward_batch import build_forward_batch
from baton.common.kvcache.channel_order import check_model
from baton.common.speculative import eagle3
from baton.tests.helpers.family_parity import save_random, tokens
from baton.tests.helpers.small_models import expected_logits, load_runner, row_of, scattered_pages, server_config
from baton.tests.helpers.thread_ranks import on_attention_groups

FAMILIES = {
    "Gemma2": {"head_dim": 16, "sliding_window": 24},
    "Olmo2": {},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"residual_multiplier": 0.3},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_groups_compute_mlps_together(tmp_path, family):
    """Each group has prompts of its own, of other lengths."""
    model = save_random(tmp_path, family, **FAMILIES[family])

    def compute(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        runner = load_runner(server_config(tmp_path), parallel)
        prompt = tokens(20 + 13 * parallel.dp_rank)
        info = runner.sync_dp(len(prompt), len(prompt), can_decode=False)
        rows = [row_of(runner, prompt, 0, scattered_pages(runner, 1, len(prompt))[0])]
        batch = build_forward_batch(rows, 16, runner.device, list(range(len(prompt))))
        return runner.forward(batch, info=info), expected_logits(model, prompt)

    for found, wanted in on_attention_groups(2, compute):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_heads_that_read_states_between_layers_are_refused_for_parallel_layers(tmp_path):
    save_random(tmp_path, "Cohere")
    config = server_config(tmp_path)
    context = SimpleNamespace(model=load_runner(config)._model, config=config)
    with pytest.raises(ConfigError, match="computes attention and MLP in parallel, so that a head"):
        eagle3.load(context)


def test_double_sparsity_is_refused_for_capped_scores(tmp_path):
    save_random(tmp_path, "Gemma2", sliding_window=256, head_dim=16)
    with pytest.raises(ConfigError, match="does not cap scores, and this model's are capped at 50: leave it out"):
        check_model(load_runner(server_config(tmp_path)).spec)
