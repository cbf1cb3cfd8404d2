"""Families that are close to Llama, against transformers."""

from __future__ import annotations

import pytest

from baton.tests.helpers.family_parity import check_family

CASES = {
    "granite": ("Granite", {"attention_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 2.0,
                            "residual_multiplier": 0.3}),
    "granite with biases": ("Granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, **config)
