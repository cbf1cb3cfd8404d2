"""Families with other norms, scores, rotary embeddings and activations than Llama's, on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from baton.common.models import llama4
from baton.tests.gpu.whole_models import check_bfloat16, check_graphs_and_overlap
from baton.tests.helpers.family_parity import save_random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {"num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 512}
FAMILIES = {
    "Gemma2": {"head_dim": 64, "sliding_window": 24, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0},
    "Granite": {"attention_multiplier": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.3},
    "Cohere2": {"sliding_window": 24, "sliding_window_pattern": 2},
    "Olmo2": {},
    "GPTNeoX": {},
}


@pytest.mark.parametrize("backend", ["triton", *(["flashinfer"] if find_spec("flashinfer") else [])])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_as_close_as_transformers(tmp_path, family, backend):
    model = save_random(tmp_path, family, **SHAPE | FAMILIES[family])
    check_bfloat16(model, tmp_path, backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_and_overlap_change_no_token(tmp_path, family):
    save_random(tmp_path, family, **SHAPE | FAMILIES[family])
    check_graphs_and_overlap(tmp_path)


def test_graphs_of_attention_within_chunks(tmp_path, monkeypatch):
    """Page tables begin with a chunk, which decode steps enter."""
    monkeypatch.setattr(llama4, "_DEFAULT_CHUNKS", 8)
    save_random(tmp_path, "Llama4", config_name="Llama4Text", **SHAPE, head_dim=64, intermediate_size_mlp=512,
                num_local_experts=4, num_experts_per_tok=1, num_hidden_layers=4, no_rope_layer_interval=2,
                interleave_moe_layer_step=2, attention_chunk_size=16)
    check_graphs_and_overlap(tmp_path)
