"""Mixtures of experts against transformers: families, forms of the checkpoint, layers without experts."""

from __future__ import annotations

import pytest

from baton.tests.common.small_models import load_runner, server_config
from baton.tests.common.small_moe import FAMILIES, save_moe
from baton.tests.common.test_models_numerics import check_whole_and_decode

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
    model = save_moe(tmp_path, family)
    model.save_pretrained(tmp_path, save_original_format=False)
    check_whole_and_decode(load_runner(server_config(tmp_path)), model)
