"""Pipeline parallelism over gloo ranks: stages answer as one rank and transformers do, and work at the same time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.cli import parse
from baton.common.config.server import CacheArgs, ParallelArgs, ServerConfig
from baton.common.distributed.pipeline_parallel import PPStages
from baton.common.models.registry import load_model_spec
from baton.common.runner.kv_sizing import kv_layout
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import expected_logits, save_model, server_config
from baton.tests.helpers.small_moe import save_moe

PP_RANK = Path(__file__).with_name("pp_rank.py")


def run_stages(size: int, folder: Path, cases: list[dict], device: str = "cpu") -> list[dict]:
    """Two stages of ``size`` ranks together."""
    return run_ranks(PP_RANK, size, folder, "2", device, *map(json.dumps, cases))


def make_prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, 97, length).tolist() for length in lengths]
    return [*prompts, prompts[1] + prompts[0]]  # the last one begins with what the prefix cache has


def greedy(model, prompts: list[list[int]]) -> dict[str, list[int]]:
    found = {}
    for i, prompt in enumerate(prompts):
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                             max_new_tokens=8 + 5 * i % 11, do_sample=False)
        found[str(i)] = out[0, len(prompt):].tolist()
    return found


def alone(checkpoint: Path, prompts: list[list[int]], **options) -> dict[str, list[int]]:
    engine = Engine(checkpoint, **options)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, max_new_tokens=8 + 5 * i % 11)
    return tokens_of(engine.run())


def check_together(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    """Of a prompt's 8 chunks, whose computing takes long on either stage: stage 0 computes one while stage 1 computes
    the one before. The tokens that follow wait for each other."""
    together = [first[n + 1][0] < second[n][1] and second[n][0] < first[n + 1][1] for n in range(7)]
    assert sum(together) >= 5, (first, second)
    assert all(first[n][1] < second[n][1] for n in range(8)), "no stage computes what the one before has not"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_answer_as_transformers_do(tmp_path, size):
    dense, tied, moe, latent = (tmp_path / name for name in ("dense", "tied", "moe", "latent"))
    model, tied_model = save_model(dense, "Qwen2"), save_model(tied, "Qwen3", tie_word_embeddings=True)
    save_moe(moe, "Qwen3Moe")
    save_deepseek(latent, 3)  # a dense layer, then mixtures
    save_gpt_oss(tmp_path / "windowed")
    prompts = make_prompts([3, 50, 17, 9])
    of_prompts = {"return_logprob": True, "logprob_start_len": 0}
    cases = [
        {"checkpoint": str(dense), "prompts": prompts, "chunk": 16, "page_size": 4},
        {"checkpoint": str(tied), "prompts": prompts, "parallel": {"pp_layer_partition": [1, 2]}},
        {"checkpoint": str(dense), "prompts": prompts, "chunk": 16, "max_total_tokens": 120},  # some are retracted
        {"checkpoint": str(dense), "prompts": prompts, "chunk": 8, "abort": 1},
        {"checkpoint": str(dense), "prompts": prompts, "chunk": 8, "fields": of_prompts,
         "parallel": {"pp_max_micro_batch_size": 1}},
        {"checkpoint": str(moe), "prompts": prompts, "chunk": 16},
        {"checkpoint": str(dense), "prompts": [list(range(20, 84))], "chunk": 8, "delay": 0.05},
        {"checkpoint": str(latent), "prompts": prompts, "chunk": 16},
        # The second stage begins with a layer without a window.
        {"checkpoint": str(tmp_path / "windowed"), "prompts": prompts, "chunk": 16,
         "parallel": {"pp_layer_partition": [1, 3]}},
    ]
    # Pages of host memory: what the first five requests leave is evicted before the next five ask for it.
    tier = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    again = [*prompts, *prompts]
    cases += [{"checkpoint": str(dense), "prompts": again, "chunk": 16, "max_total_tokens": 120, "page_size": 4,
               "max_running": 2, "tiers": tier},
              {"checkpoint": str(latent), "prompts": again, "chunk": 16, "max_total_tokens": 120, "page_size": 4,
               "max_running": 2, "tiers": tier, "parallel": {"pp_layer_partition": [1, 2]}}]
    ranks = run_stages(size, tmp_path, cases)
    first, last = ranks[0], ranks[-1]
    assert [rank["stage"] for rank in ranks] == sorted(rank["stage"] for rank in ranks)
    tokens = np.random.default_rng(2).integers(0, 97, 30)
    torch.testing.assert_close(last["logits"], expected_logits(model, tokens), atol=1e-4, rtol=0)
    assert len(first["logits"]) == 0, "only the last stage scores"
    expected = greedy(model, prompts)
    for case in (0, 2, 4):
        assert first["cases"][case]["tokens"] == expected, case
    assert first["cases"][1]["tokens"] == greedy(tied_model, prompts)
    assert first["cases"][5]["tokens"] == alone(moe, prompts)
    assert first["cases"][7]["tokens"] == alone(latent, prompts)
    assert first["cases"][8]["tokens"] == alone(tmp_path / "windowed", prompts)
    assert first["cases"][0]["cached"] > 0 and first["cases"][2]["retracted"] > 0
    assert [rank["cases"][0]["layers"] for rank in (first, last)] == [2, 1]
    for case, checkpoint in ((9, dense), (10, latent)):
        loaded = {rank["cases"][case]["loaded"] for rank in ranks}
        assert len(loaded) == 1 and loaded.pop() > 0, "all stages load the same pages"
        assert first["cases"][case]["tokens"] == alone(checkpoint, again)
    aborted = first["cases"][3]
    assert aborted["aborted"] == ["1"] and not aborted["failed"]
    assert {rid: told for rid, told in aborted["tokens"].items() if rid != "1"} \
        == {rid: told for rid, told in expected.items() if rid != "1"}
    told = first["cases"][4]
    for i, prompt in enumerate(prompts):
        logprobs = expected_logits(model, np.array(prompt + expected[str(i)])).log_softmax(-1)
        wanted = [logprobs[place, token].item() for place, token in enumerate((prompt + expected[str(i)])[1:])]
        assert told["prompt_logprobs"][str(i)][0] is None
        found = told["prompt_logprobs"][str(i)][1:] + told["logprobs"][str(i)]
        np.testing.assert_allclose(found, wanted, atol=1e-3)
    check_together(first["cases"][6]["steps"], last["cases"][6]["steps"])
    for rank in ranks:
        assert [len(case["steps"]) for case in rank["cases"]] == [len(case["steps"]) for case in first["cases"]]


def test_a_stage_s_pool_has_its_layers_and_their_scales(tmp_path):
    save_model(tmp_path, "Llama")
    spec = load_model_spec(server_config(tmp_path).model)
    scales = ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    layout = kv_layout(CacheArgs(kv_cache_dtype="fp8_e4m3"), spec, 1, "float32", scales, range(1, 3))
    assert (layout.num_layers, layout.first_layer, layout.model_layers) == (2, 1, 3)
    assert layout.scales == scales[1:]
    assert kv_layout(CacheArgs(), spec, 1, "float32", (), range(3)) == kv_layout(CacheArgs(), spec, 1, "float32")


def test_layers_are_shared_evenly_or_as_told():
    def of(num_layers: int, size: int, partition: tuple[int, ...] = ()) -> list[int]:
        way = object()
        return [len(PPStages(i, size, from_previous=way if i else None, to_next=way if i < size - 1 else None,
                             partition=partition).layers(num_layers)) for i in range(size)]

    assert of(7, 3) == [3, 2, 2] and of(4, 2) == [2, 2] and of(5, 2, (1, 4)) == [1, 4]
    with pytest.raises(ConfigError, match="more than the model's 2 layers"):
        of(2, 3)
    with pytest.raises(ConfigError, match="names 5 layers, and the model has 6"):
        of(6, 2, (1, 4))


@pytest.mark.parametrize("fields, words", [
    ({"pp_size": 0}, "--pp-size must be 1 or more"),
    ({"pp_max_micro_batch_size": 2}, "need a --pp-size above 1"),
    ({"pp_size": 2, "pp_max_micro_batch_size": 0}, "--pp-max-micro-batch-size must be 1 or more"),
    ({"pp_size": 2, "pp_layer_partition": (3,)}, "for each of the 2 stages"),
    ({"pp_size": 2, "tp_size": 2, "ep_size": 2, "enable_eplb": True},
     "need the experts of all layers in each rank: leave them out with --pp-size"),
])
def test_what_does_not_fit_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        ParallelArgs(**fields)


@pytest.mark.parametrize("flags, words", [
    (["--disaggregation-mode", "decode"], "--pp-size is for prefill and unified servers"),
    (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "--enable-dp-attention does not work across"),
    (["--is-embedding"], "--is-embedding does not work across"),
    (["--enable-mixed-chunk"], "--enable-mixed-chunk does not work across"),
    (["--retract-host-memory-gb", "1"], "--retract-host-memory-gb does not work across"),
    (["--enable-return-hidden-states"], "--enable-return-hidden-states does not work across"),
    (["--nnodes", "4", "--dist-init-addr", "127.0.0.1:5000"], "must divide --tp-size 1 times --pp-size 2"),
])
def test_servers_that_cannot_have_stages_say_so(flags, words, capsys):
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--model-path", "m", "--pp-size", "2", *flags], prog="x", description="")
    assert words in capsys.readouterr().err
