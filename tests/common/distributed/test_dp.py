"""Data-parallel attention over gloo ranks: every attention group computes its own requests as one rank would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.common.api.merged_states import merge_states
from baton.common.api.messages import Generate, State
from baton.common.api.sampling import SamplingParams
from baton.common.config.cli import parse
from baton.common.config.server import ServerConfig
from baton.common.distributed.token_exchange import TokenExchange
from baton.common.distributed.tp import TPGroup
from baton.common.engine_client.dp_balancer import DPBalancer
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.hybrid_models import save_hybrid
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import save_model
from baton.tests.helpers.small_moe import save_moe

LENGTHS = [[3, 50, 17, 9], [31]]  # of the prompts of either data-parallel rank


def run_groups(size: int, folder: Path, cases: list[dict], device: str = "cpu", groups: int = 2) -> list[dict]:
    """Attention groups of ``size`` ranks together."""
    script = Path(__file__).with_name("dp_rank.py")
    return run_ranks(script, size, folder, str(groups), device, *map(json.dumps, cases))


def make_prompts(seed: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [[rng.integers(8, 97, length).tolist() for length in lengths] for lengths in LENGTHS]


def alone(checkpoint: Path, prompts: list[list[int]], **options) -> list[list[int]]:
    """What a single rank answers."""
    engine = Engine(checkpoint, **options)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, max_new_tokens=8 + 5 * i)
    tokens = tokens_of(engine.run())
    return [tokens[str(i)] for i in range(len(prompts))]


def greedy(model, prompt: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count,
                         do_sample=False)
    return out[0, len(prompt):].tolist()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_groups_compute_their_own_requests_as_one_rank_would(tmp_path, size):
    dense, tied, moe, latent = (tmp_path / name for name in ("dense", "tied", "moe", "latent"))
    model = save_model(dense, "Qwen2")
    save_model(tied, "Qwen3", tie_word_embeddings=True)
    save_moe(moe, "Qwen3Moe")
    save_gpt_oss(tmp_path / "windowed", eos_token_id=None)
    save_deepseek(latent, 3)
    prompts = make_prompts(1)
    variants = [
        (dense, {}),
        (dense, {"dp_head": True, "chunk": 8, "overlap": True}),
        (dense, {"max_total_tokens": 88, "chunk": 16}),  # too few pages for rank 0's requests: some are retracted
        (tied, {"overlap": True}),
        (moe, {}),
        (moe, {"experts": (size, "alltoall"), "chunk": 16}),  # of two ranks each sends its own tokens to their experts
        (dense, {"sizes": [2]}),  # decode steps as CUDA graphs have them, of four requests none
        (moe, {"sizes": [1, 4], "dp_head": True}),
        (tmp_path / "windowed", {"experts": (size,), "chunk": 16}),
        (moe, {"halves": True, "experts": (size,)}),  # the middle is within a request
        (latent, {"halves": True, "chunk": 32, "overlap": True}),
        (moe, {"pieces": [48, 80], "chunk": 48, "experts": (size,), "sizes": [1, 4]}),  # rank 1 in part with one row
        (latent, {"pieces": [32], "chunk": 32, "overlap": True}),
        (latent, {"whole_dense": True, "experts": (size,), "chunk": 16, "sizes": [1, 4]}),
    ]
    cases = [{"checkpoint": str(folder), "prompts": prompts, **options} for folder, options in variants]
    cases.append({"checkpoint": str(dense), "prompts": [[], prompts[1]], "halves": True})  # rank 0 only accompanies
    ranks = run_groups(size, tmp_path, cases)
    for rank, seen in enumerate(ranks):
        group = rank // (size // 2)
        assert all(seen["exchanges"]) and len(seen["exchanges"]) == 6
        for (folder, _), found in zip(variants, seen["cases"]):
            assert found["tokens"] == alone(folder, prompts[group]), (rank, folder)
        assert (seen["cases"][2]["retracted"] > 0) == (group == 0)
        for case in (6, 7):
            assert seen["cases"][case]["replayed"] == ranks[0]["cases"][case]["replayed"]
        assert seen["cases"][9]["cut"] == [[38, 41], [14, 17]][group:group + 1], "all prompts are in one step"
        assert len(seen["cases"][10]["cut"]) == len(ranks[0]["cases"][10]["cut"]) > 0
        for case in (11, 12):
            assert seen["cases"][case]["pieces"] == ranks[0]["cases"][case]["pieces"]
        assert seen["cases"][-1]["cut"] == [[[1, 1]], [[14, 17]]][group]
        assert [seen["cases"][case]["first_mlp"] for case in (12, 13)] == [(88 // size, 48), (88, 48)]
        turns = {other["cases"][0]["turns"] for other in ranks}
        assert len(turns) == 1, "all ranks meet in every turn"
        assert seen["cases"][-1]["tokens"] == (alone(dense, prompts[1]) if group else [])
        assert bool(seen["cases"][-1]["computed"]) == bool(group)
    small, whole = (ranks[0]["cases"][case] for case in (6, 7))
    assert set(small["replayed"]) == {2} and set(whole["replayed"]) == {1, 4}
    assert 0 < len(small["replayed"]) < len(whole["replayed"]) < whole["turns"]
    assert ranks[0]["cases"][11]["pieces"][:2] == [(48, [48, 31]), (48, [31, 1])]
    assert ranks[0]["cases"][12]["pieces"][:2] == [(32, [32, 31]), (32, [32, 1])]
    expected = [greedy(model, prompt, 8 + 5 * i) for i, prompt in enumerate(prompts[0])]
    assert ranks[0]["cases"][0]["tokens"] == expected


def test_groups_compute_hybrid_models(tmp_path):
    """Each group has states of its own; one without work computes a page that no request reads."""
    dense, moe = tmp_path / "dense", tmp_path / "moe"
    save_hybrid(dense)
    save_hybrid(moe, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[],
                shared_expert_intermediate_size=20, decoder_sparse_step=1)
    prompts, states = make_prompts(3), {"cache": {"max_mamba_cache_size": 40}}
    variants = [(dense, {"overlap": True, "chunk": 16}), (moe, {"experts": (2,), "chunk": 16})]
    ranks = run_groups(2, tmp_path, [{"checkpoint": str(folder), "prompts": prompts, **states, **options}
                                     for folder, options in variants])
    for group, seen in enumerate(ranks):
        for (folder, options), found in zip(variants, seen["cases"]):
            assert found["tokens"] == alone(folder, prompts[group], **states), (group, options)


def test_decode_steps_meet_in_their_norms(tmp_path):
    """Where the ranks can write into each other's memory, and else not."""
    save_moe(tmp_path / "moe", "Qwen3Moe")
    prompts = make_prompts(2)
    case = {"checkpoint": str(tmp_path / "moe"), "prompts": prompts, "sizes": [1, 4], "experts": (2, "low_latency")}
    others = [case | {"experts": experts, "peers": True} for experts in ((1, "low_latency"), (2, "peer"))]
    ranks = run_groups(2, tmp_path, [case, *others])
    for group, seen in enumerate(ranks):
        wanted = alone(tmp_path / "moe", prompts[group])
        assert [found["tokens"] for found in seen["cases"]] == [wanted] * 3
        assert not seen["cases"][0]["met"]
    for which in (1, 2):
        check_met([seen["cases"][which]["met"] for seen in ranks])


def check_met(ranks: list[list[list[int]]]) -> None:
    """All ranks know of the same rows that they only pad."""
    assert ranks[0] == ranks[1] and {len(live) for live in ranks[0]} == {2, 8}
    assert [1, 1, 1, 1, 1, 0, 0, 0] in ranks[0], "four requests of rank 0 beside one of rank 1"
    assert [1, 0] in ranks[0], "rank 1 has no work any more"


@pytest.mark.parametrize("backend,flags", [
    ("low_latency", ["--tp-size", "2", "--ep-size", "2"]), ("low_latency", []), ("peer", []),
    ("peer", ["--tp-size", "4", "--ep-size", "4", "--dp-size", "2", "--enable-dp-attention"]),
])
def test_ranks_without_tokens_of_their_own_do_not_meet(backend, flags, capsys):
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--model-path", "m", "--moe-a2a-backend", backend, *flags], prog="x", description="")
    assert f"{backend} is for several ranks that each have tokens of their own" in capsys.readouterr().err


def test_decode_steps_that_cannot_meet_say_so_once(caplog):
    exchange, rows = TokenExchange(TPGroup(0, 2), low_latency=True), torch.zeros(3, 8)
    together = exchange.step([3, 3], all_decode=True)
    assert not exchange.low_latency.can_gather(rows, together) and not exchange.low_latency.can_gather(rows, together)
    sentence = "Decode steps of 3 rows reach experts over gloo: the ranks cannot write into each other's memory."
    assert caplog.text.count(sentence) == caplog.text.count("Decode steps") == 1
    for step in (exchange.step([3, 4], all_decode=True), exchange.step([3, 3])):
        assert step.decode_rows == 0 and not exchange.low_latency.can_gather(rows, step)


def request(rid: str, tokens: int = 1, dp_rank: int | None = None) -> Generate:
    return Generate(rid, [1] * tokens, SamplingParams(), dp_rank=dp_rank)


def assigned(balancer: DPBalancer, *args, **kwargs) -> int | None:
    made = request(*args, **kwargs)
    balancer.assign(made)
    return made.dp_rank


def test_round_robin_and_named_ranks():
    balancer = DPBalancer("round_robin", 3)
    assert [assigned(balancer, name) for name in "abcd"] == [0, 1, 2, 0]
    assert assigned(balancer, "e", dp_rank=2) == 2


def test_the_shortest_queue():
    balancer = DPBalancer("shortest_queue", 2)
    assert [assigned(balancer, name, dp_rank=1) for name in "ab"] == [1, 1]
    assert [assigned(balancer, name, tokens=99) for name in "cd"] == [0, 0]
    balancer.release("a")
    balancer.release("b")
    assert assigned(balancer, "e") == 1


def test_the_fewest_tokens():
    balancer = DPBalancer("minimum_tokens", 2)
    assert assigned(balancer, "a", tokens=10) == 0
    assert [assigned(balancer, name, tokens=4) for name in "bcd"] == [1, 1, 1]
    assert assigned(balancer, "e") == 0
    balancer.add_tokens("a", 30)
    assert assigned(balancer, "f") == 1
    balancer.release("a")
    assert assigned(balancer, "g") == 0


def test_states_add_up():
    one = State(1, 10, 4, 5, 1, 16, 1, 2, 0, {"a": 1.0}, {"token_usage": 0.5})
    two = State(1, 10, 10, 0, 0, 16, 0, 0, 3, {"a": 2.0, "b": 1.0}, {"token_usage": 0.0}, dp_rank=1)
    both = merge_states([one, two])
    assert (both.total_pages, both.free_pages, both.held_pages, both.cached_pages) == (20, 14, 5, 1)
    assert (both.num_running, both.num_waiting, both.num_transferring) == (1, 2, 3)
    assert both.counters == {"a": 3.0, "b": 1.0} and both.gauges == {"token_usage": 0.25}
    assert merge_states([one]) is one
