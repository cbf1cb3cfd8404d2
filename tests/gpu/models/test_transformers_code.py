"""Models by transformers' code on a GPU: as close as transformers, and captured."""

from __future__ import annotations

import pytest
import torch

from baton.tests.common.models.test_transformers_impl import FAMILIES, save
from baton.tests.gpu.whole_models import check_bfloat16, check_graphs_and_overlap
from baton.tests.helpers.small_models import load_runner, server_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64}
TRIED = ("Llama", "Granite", "Olmo2", "Glm", "Starcoder2", "Olmoe")


@pytest.mark.parametrize("family", TRIED)
def test_bfloat16_stays_as_close_as_transformers(tmp_path, family):
    check_bfloat16(save(tmp_path, family, **FAMILIES[family] | SIZES), tmp_path, "triton", model_impl="transformers")


@pytest.mark.parametrize("family", TRIED)
def test_graphs_and_overlap_change_no_token(tmp_path, family):
    save(tmp_path, family, **FAMILIES[family] | SIZES)
    check_graphs_and_overlap(tmp_path, model_impl="transformers")
    runner = load_runner(server_config(tmp_path, model_impl="transformers", backend="triton"), device="cuda:0")
    assert runner.captures_decode
