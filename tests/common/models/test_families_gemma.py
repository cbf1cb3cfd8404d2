"""Gemma 1 and 2 against transformers."""

from __future__ import annotations

import pytest

from baton.tests.helpers.family_parity import check_family

CASES = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma 2": ("Gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma 2 without caps": ("Gemma2", {"head_dim": 12, "sliding_window": 24, "attn_logit_softcapping": None,
                                        "final_logit_softcapping": None, "hidden_activation": "gelu"}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, **config)
