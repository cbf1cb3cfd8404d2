"""Tensor parallelism over gloo ranks, each a process: equal to one rank, whatever is sharded or replicated."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.distributed.tp import TPGroup
from baton.common.models.registry import load_model_spec
from baton.common.request.sampling_metadata import FAILED
from baton.kernels import reference
from baton.tests.common.distributed.tp_rank import parts_of
from baton.tests.helpers.nemotron_models import save_nemotron
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

TP_RANK = Path(__file__).with_name("tp_rank.py")


@pytest.mark.parametrize("family,changes", [
    ("Qwen2", {"vocab_size": 131}),  # biases, a vocabulary that two ranks cannot share evenly
    ("Qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),  # fewer KV heads than ranks: replicated
    ("Nemotron", {"attention_bias": True, "mlp_bias": True}),  # a user's, with LayerNorms and MLPs without gates
])
def test_two_ranks_equal_one(tmp_path, family, changes):
    checkpoint = tmp_path / "model"
    save = save_nemotron if family == "Nemotron" else partial(save_model, family=family)
    model = save(checkpoint, **changes)
    ranks = run_ranks(TP_RANK, 2, tmp_path, str(checkpoint))
    tokens = np.random.default_rng(2).integers(0, 97, 30)
    want = expected_logits(model, tokens)
    dummy = load_runner(server_config(checkpoint, load_format="dummy"))
    want_dummy = forward(dummy, [(tokens, 0, scattered_pages(dummy, 1, 30)[0])])
    for rank in ranks:
        torch.testing.assert_close(rank["logits"]["checkpoint"], want, atol=1e-4, rtol=0)
        torch.testing.assert_close(rank["logits"]["dummy"], want_dummy, atol=1e-4, rtol=0)
        torch.testing.assert_close(rank["pieces"], want, atol=1e-4, rtol=0)
        assert set(rank["replayed"]) == {48}
        assert rank["heads"] == 1 and rank["bytes_equal"] and rank["least"] == [0, -1, 5]
    assert ranks[0]["tokens"] == ranks[1]["tokens"] and len(set(ranks[0]["tokens"])) > 5
    for rank in ranks:  # a processor fails on the rank that chooses: all know of which rows, and why
        assert [token == FAILED for token in rank["failed"]] == [i % 2 == 1 for i in range(30)]
        assert list(rank["reasons"]) == list(range(1, 30, 2))
        assert all("as asked" in reason for reason in rank["reasons"].values())
    assert ranks[0]["failed"] == ranks[1]["failed"] and "ValueError: as asked" in ranks[0]["reasons"][1]


def test_deterministic_ranks_add_in_their_order(tmp_path):
    """Three ranks: two would add a and b in any order alike."""
    save_model(tmp_path / "model", "Qwen3", num_attention_heads=6, num_key_value_heads=3, intermediate_size=96)
    ranks = run_ranks(TP_RANK, 3, tmp_path, str(tmp_path / "model"))
    for dtype in (torch.float32, torch.bfloat16):
        parts = zip(*(parts_of(rank, dtype) for rank in range(3)))
        for index, part in enumerate(parts):
            want = reference.all_reduce(list(part))
            assert all(torch.equal(rank["ordered"][dtype][index], want) for rank in ranks)


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    save_model(tmp_path, "Llama")
    spec = load_model_spec(server_config(tmp_path).model)
    spec.check_tp(1)
    spec.check_tp(2)
    spec.check_tp(4)  # two ranks share a KV head
    with pytest.raises(ConfigError, match="attention heads"):
        spec.check_tp(3)


def test_a_single_rank_needs_no_process_group():
    tp = TPGroup()
    x = torch.arange(3.0)
    assert tp.all_reduce(x) is x and tp.all_gather_last_dim(x) is x and tp.broadcast(x) is x
    assert tp.broadcast_bytes(b"ab") == b"ab" and tp.min_reduce(np.array([3]))[0] == 3
    assert not torch.distributed.is_initialized()
