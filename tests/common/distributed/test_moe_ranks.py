"""Experts over gloo ranks, each a process: slices of experts, whole ones, and tokens sent to them; all equal to
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.moe import MoESpec
from baton.common.config.server import ParallelArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup
from baton.common.runner.expert_location import place_experts
from baton.tests.common.distributed.moe_rank import TOKENS, layer, local_tokens, two_tokens
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import expected_logits, load_runner, server_config
from baton.tests.helpers.small_moe import save_moe

MOE_RANK = Path(__file__).with_name("moe_rank.py")


@pytest.mark.parametrize("size,families", [(2, ("GptOss", "Mixtral", "Qwen2Moe")), (4, ("Qwen3Moe",))])
def test_ranks_equal_transformers(tmp_path, size, families):
    checkpoints = tmp_path / "models"
    models = {family: save_moe(checkpoints / family, family, num_hidden_layers=2) for family in families}
    ranks = run_ranks(MOE_RANK, size, tmp_path, str(checkpoints))
    want = {family: expected_logits(model, TOKENS) for family, model in models.items()}
    alone = layer(ExpertParallel(TPGroup()))
    for found in ranks:
        assert {name for _, name in found["logits"]} == {"ep1", "ep2", "alltoall", *(["ep4"] if size == 4 else [])}
        for (family, name), logits in found["logits"].items():
            assert (logits - want[family]).abs().max() < 1e-4, (family, name)
        for a2a, moved in found["balanced"].items():
            check_moved(moved, want[families[0 if a2a == "none" else -1]], a2a)
            assert moved["placements"] == ranks[0]["balanced"][a2a]["placements"]
        check_variants(found["variants"], want[families[-1]], size)
    check_passes([found["variants"]["static"]["passes"] for found in ranks])
    for rank, found in enumerate(ranks):
        for name, each in found["variants"].items():
            assert each["placements"] == ranks[0]["variants"][name]["placements"], name
        with torch.inference_mode():
            torch.testing.assert_close(found["spread"], alone(local_tokens(rank)), atol=1e-5, rtol=1e-4)
            for sent, met, _ in found["apart"]:
                torch.testing.assert_close(sent, found["spread"], atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(met, alone(two_tokens(rank)), atol=1e-5, rtol=1e-4)
        choices = 3 * (sum(len(local_tokens(other)) for other in range(size)) + 2 * size)
        assert [counted for *_, counted in found["apart"]] == [choices, 2 * choices], "each token once"


def check_moved(moved: dict, want: torch.Tensor, a2a: str) -> None:
    """Experts have moved after every third step, and no logit has changed; the record has all of 30 tokens' choices in
    two layers."""
    assert (moved["logits"] - want).abs().max() < 1e-4, a2a
    assert (moved["again"] - want).abs().max() < 1e-4, a2a
    steps = moved["placements"]
    assert steps[0] == steps[1] != steps[2] == steps[3] == steps[4], "the third step's forward pass moves experts first"
    assert len({str(step) for step in steps}) >= 3
    assert moved["said"] == f"Recorded {30 * 3 * 2} choices of experts."


def check_variants(variants: dict, want: torch.Tensor, size: int) -> None:
    for name, found in variants.items():
        assert (name == "fake") is bool((found["logits"] - want).abs().max() > 1e-3), name
    chunks = variants["chunks"]["placements"]
    first, second = zip(*chunks)
    assert first[2] != first[3] == first[4] and second[3] != second[4] == second[5], "one layer before each step"
    assert len({str(step) for step in variants["threshold"]["placements"]}) == 1, "ranks are used well enough"
    (one, other), *later = variants["mapped"]["placements"]
    assert [sum(each, [])[:8] for each in (one, other)] == [[7, *range(7)], [5, 6, 7, 0, 1, 2, 3, 4]]
    assert later == [[one, other]] * 10
    for placed, busiest in zip(variants["counted"]["placements"][0], (7, 0)):
        assert sum(busiest in rank for rank in placed) == size, "the busiest expert is on all ranks"
    assert variants["last steps"]["said"] == f"Recorded {4 * 3 * 2} choices of experts."
    used = {name: found["gauges"]["expert_utilization"] for name, found in variants.items()}
    assert all(0 < value <= 1 for value in used.values()) and used["threshold"] < 1
    assert all(max(counts) - min(counts) <= 12 for counts in variants["fake"]["counts"])


def check_passes(files: list[dict]) -> None:
    """Each rank's file has its own tokens by physical experts; the sum of all is that of the step."""
    assert [{record["rank"] for record in file["records"]} for file in files] == [{rank} for rank in range(len(files))]
    counts = torch.stack([torch.stack([record["global_physical_count"] for record in file["records"]])
                          for file in files])
    assert counts.shape[1:] == (11, 2, 8 + len(files))
    assert counts.sum((0, 3)).tolist() == [[60, 60], *[[3, 3]] * 10]
    assert all(sorted(set(row)) == list(range(8)) for row in files[0]["last_physical_to_logical_map"].tolist())


@pytest.mark.parametrize(("value", "sentence"), [
    ("nowhere.json", "Cannot read --init-expert-location nowhere.json: No such file"),
    ("random", "must be trivial, JSON"),
    ("{", "Cannot read"), ("{}", "must have a physical_to_logical_map or a logical_count"),
    ('{"logical_count": "x"}', "must be an array of whole numbers"),
    ('{"logical_count": [[1, 2]]}', "must have a row for each of the model's 2 layers"),
    ('{"logical_count": [[1, 2], [3, 4]]}', "a number of tokens for each of the model's 8 experts"),
    ('{"physical_to_logical_map": [[1, 2], [3, 4]]}', "must have 8 experts in each layer"),
    ('{"physical_to_logical_map": [[0, 0, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]}', "none twice on a rank")])
def test_locations_that_do_not_fit_are_refused(tmp_path, value, sentence):
    save_moe(tmp_path, "Qwen3Moe", num_hidden_layers=2)
    share = ExpertParallel(TPGroup(), eplb=True)
    model = load_runner(server_config(tmp_path, dtype="float32"), Parallel(experts=share))._model
    with pytest.raises(ConfigError, match=sentence):
        place_experts(SimpleNamespace(init_expert_location=value, ep_dispatch_algorithm="dynamic"), model)


def test_a_record_is_a_location(tmp_path):
    save_moe(tmp_path, "Qwen3Moe", num_hidden_layers=2)
    share = ExpertParallel(TPGroup(), eplb=True)
    model = load_runner(server_config(tmp_path, dtype="float32"), Parallel(experts=share))._model
    counts = torch.arange(16).view(2, 8)
    torch.save({"logical_count": counts[None]}, tmp_path / "a.pt")
    (tmp_path / "b.json").write_text(json.dumps({"layers": [0, 1], "logical_count": counts.tolist()}))
    for name in ("a.pt", "b.json"):
        location = str(tmp_path / name)
        place_experts(SimpleNamespace(init_expert_location=location, ep_dispatch_algorithm="dynamic"), model)


def test_shares_of_experts():
    """Three by two of six ranks: every expert whole in one row, every slice of it on one rank."""
    shares = [ExpertParallel(TPGroup(rank, 6), 3) for rank in range(6)]
    assert [(share.ep_rank, share.expert_tp_rank) for share in shares] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    spec = MoESpec(num_experts=6, top_k=2, intermediate_size=8, layers=(0,))
    shares[0].check(spec)


@pytest.mark.parametrize("share,experts,width,sentence", [
    (ExpertParallel(TPGroup(0, 4), 4), 6, 8, "--ep-size 4 must divide the model's 6 experts"),
    (ExpertParallel(TPGroup(0, 4), 4, redundant=3), 8, 8,
     "--ep-num-redundant-experts 3 must be a multiple of --ep-size"),
    (ExpertParallel(TPGroup(0, 2), 2, redundant=10), 8, 8, "leave each rank at most the model's 8 experts once"),
    (ExpertParallel(TPGroup(0, 4), 2), 6, 7, "2 ranks cannot share an expert's intermediate size 7 evenly"),
])
def test_experts_that_do_not_come_out_even_are_refused(share, experts, width, sentence):
    with pytest.raises(ConfigError, match=sentence):
        share.check(MoESpec(num_experts=experts, top_k=2, intermediate_size=width, layers=(0,)))


def test_flags_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="for mixtures of experts, which this model is not"):
        ExpertParallel(TPGroup(0, 2), 2).check(None)
    for args in ({"enable_eplb": True}, {"ep_num_redundant_experts": 2, "tp_size": 4, "ep_size": 2}):
        with pytest.raises(ConfigError, match="set --tp-size and --ep-size to the same number of 2 or more"):
            ParallelArgs(**args)
    with pytest.raises(ConfigError, match="--eplb-rebalance-num-iterations is for --enable-eplb"):
        ParallelArgs(eplb_rebalance_num_iterations=5)
    with pytest.raises(ConfigError, match="--ep-size 3 must be 1 or more and divide --tp-size 4"):
        ParallelArgs(tp_size=4, ep_size=3)
    for backend in ("alltoall", "peer"):
        with pytest.raises(ConfigError, match=f"--moe-a2a-backend {backend} needs whole experts on every rank: set "
                                              "--ep-size to 4"):
            ParallelArgs(tp_size=4, ep_size=2, moe_a2a_backend=backend)
