"""Mixtures of experts against transformers: families, forms of the checkpoint, layers without experts, the engine."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from baton.common.api.errors import ConfigError
from baton.tests.common.models.test_models_numerics import check_whole_and_decode
from baton.tests.common.weights.test_weights import change
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import load_runner, server_config
from baton.tests.helpers.small_moe import FAMILIES, save_moe

SHAPES = {
    "Mixtral": [{}, {"num_experts_per_tok": 1}],
    "Qwen2Moe": [{}, {"norm_topk_prob": True}],
    "Qwen3Moe": [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}],
}


@pytest.mark.parametrize("family,changes", [(family, changes) for family in SHAPES for changes in SHAPES[family]],
                         ids=str)
def test_equals_transformers(tmp_path, family, changes):
    model = save_moe(tmp_path, family, **changes)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_checkpoint(tmp_path, family):
    """Transformers 5 may save the experts of a layer as two tensors of three dimensions."""
    model = save_moe(tmp_path, family)
    model.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(file.get_slice("model.layers.0.mlp.experts.gate_up_proj").get_shape()) == 3
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)


def test_a_missing_expert_is_named(tmp_path):
    save_moe(tmp_path, "Mixtral")
    change(tmp_path, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"))
    with pytest.raises(ConfigError, match="lacks model.layers.1.mlp.experts.3.down_proj.weight"):
        load_runner(server_config(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_the_engine(tmp_path, family):
    """Ragged prompts, chunks, and requests that come and go, each token by token as transformers' best."""
    model = save_moe(tmp_path, family, eos_token_id=None)
    engine = Engine(tmp_path, chunk=16)
    prompts = {str(count): [(7 * i + count) % 97 for i in range(count)] for count in (1, 9, 23, 40)}
    for rid, prompt in prompts.items():
        engine.start(rid, prompt, max_new_tokens=8)
    found = tokens_of(engine.run())
    for rid, prompt in prompts.items():
        assert len(found[rid]) == 8
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + found[rid]])).logits[0]
        assert logits[len(prompt) - 1:-1].argmax(-1).tolist() == found[rid]
