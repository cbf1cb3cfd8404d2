"""Experts over gloo ranks, each a process: slices of experts, whole ones, and tokens sent to them; all equal to
transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.moe import MoESpec
from baton.common.config.server import ParallelArgs
from baton.common.distributed.expert_share import ExpertShare
from baton.common.distributed.tp import TPGroup
from baton.tests.common.moe_rank import layer, own_tokens
from baton.tests.common.small_models import expected_logits
from baton.tests.common.small_moe import save_moe
from baton.tests.common.test_tp import run_ranks

TOKENS = np.random.default_rng(2).integers(0, 97, 30)


@pytest.mark.parametrize("size,families", [(2, ("Mixtral", "Qwen2Moe")), (4, ("Qwen3Moe",))])
def test_ranks_equal_transformers(tmp_path, size, families):
    checkpoints = tmp_path / "models"
    models = {family: save_moe(checkpoints / family, family, num_hidden_layers=2) for family in families}
    ranks = run_ranks(size, checkpoints, tmp_path, "moe_rank.py")
    want = {family: expected_logits(model, TOKENS) for family, model in models.items()}
    alone = layer(ExpertShare(TPGroup()))
    for rank, found in enumerate(ranks):
        assert {name for _, name in found["logits"]} == {"ep1", "ep2", "alltoall", *(["ep4"] if size == 4 else [])}
        for (family, name), logits in found["logits"].items():
            assert (logits - want[family]).abs().max() < 1e-4, (family, name)
        with torch.inference_mode():
            torch.testing.assert_close(found["spread"], alone(own_tokens(rank)), atol=1e-5, rtol=1e-4)


def test_shares_of_experts():
    """Three by two of six ranks: every expert whole in one row, every slice of it on one rank."""
    shares = [ExpertShare(TPGroup(rank, 6), 3) for rank in range(6)]
    assert [(share.ep_rank, share.split_rank) for share in shares] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    spec = MoESpec(num_experts=6, top_k=2, intermediate_size=8, layers=(0,))
    shares[0].check(spec)


@pytest.mark.parametrize("share,experts,width,sentence", [
    (ExpertShare(TPGroup(0, 4), 4), 6, 8, "--ep-size 4 must divide the model's 6 experts"),
    (ExpertShare(TPGroup(0, 4), 2), 6, 7, "2 ranks cannot share an expert's intermediate size 7 evenly"),
])
def test_experts_that_do_not_come_out_even_are_refused(share, experts, width, sentence):
    with pytest.raises(ConfigError, match=sentence):
        share.check(MoESpec(num_experts=experts, top_k=2, intermediate_size=width, layers=(0,)))


def test_flags_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="for mixtures of experts, which this model is not"):
        ExpertShare(TPGroup(0, 2), 2).check(None)
    with pytest.raises(ConfigError, match="--ep-size 3 must be 1 or more and divide --tp-size 4"):
        ParallelArgs(tp_size=4, ep_size=3)
    with pytest.raises(ConfigError, match="--moe-a2a-backend alltoall needs whole experts on every rank: set --ep-size "
                                          "to 4"):
        ParallelArgs(tp_size=4, ep_size=2, moe_a2a_backend="alltoall")
