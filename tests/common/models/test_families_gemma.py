"""Gemma against transformers."""

from __future__ import annotations

import pytest

from baton.tests.helpers.family_parity import check_family

CASES = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma 2": ("Gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma 2 without caps": ("Gemma2", {"head_dim": 12, "sliding_window": 24, "attn_logit_softcapping": None,
                                        "final_logit_softcapping": None, "hidden_activation": "gelu"}),
    "gemma 3": ("Gemma3", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9,
                           "sliding_window_pattern": 2, "rope_parameters": {
                               "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, config_name="Gemma3Text" if name == "Gemma3" else None, **config)
