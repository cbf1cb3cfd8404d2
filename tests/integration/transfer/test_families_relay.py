"""A pair computes what the unified engine does, for a family of each form of layers, rotary embeddings and scores."""

from __future__ import annotations

import numpy as np
import pytest

from baton.tests.helpers.family_parity import save_random
from baton.tests.integration.transfer.test_deepseek_relay import pair_equal_to_unified
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, bootstrap_port

__all__ = ["bootstrap_port"]

FAMILIES = {
    "Gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0},
    "Granite": {"attention_multiplier": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.3},
    "Cohere2": {"sliding_window": 24, "sliding_window_pattern": 2},
    "Olmo2": {},
    "GPTNeoX": {"hidden_size": 64},
    "Phi3": {"sliding_window": 20},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pair_equals_unified(tmp_path, bootstrap_port, family):  # noqa: F811
    save_random(tmp_path, family, std=0.3, **{"vocab_size": VOCAB, "eos_token_id": None} | FAMILIES[family])
    prompts = [np.random.default_rng(count).integers(0, VOCAB, count).tolist() for count in (1, 31, 47)]
    with pair_equal_to_unified(tmp_path, prompts, bootstrap_port, "fake") as (prefill, _):
        assert prefill.scheduler.sender.counters["kv_bytes_sent"] > 0
