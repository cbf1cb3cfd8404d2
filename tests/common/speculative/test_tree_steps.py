"""Trees of drafts through the whole engine: equal tokens, whatever is drafted."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.common.api.drafts import Drafts
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.speculative.ngram import NgramProposer
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, finishes_of, sharing_prompts, tokens_of
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.tree_drafts import TreeDrafter, TreeOracle

VOCAB = 24
REQUESTS = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 9},
            {"stop_token_ids": (3, 4)}, {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"frequency_penalty": 0.7},
            {"temperature": 1.0, "seed": 7, "stop_token_ids": (1, 2, 3)}]


def answers(checkpoint, count=16, **options):
    """Tokens and finishes of requests, some of which share prefixes, and then of a second turn of each."""
    engine = Engine(checkpoint, **options)
    prompts = sharing_prompts(count, VOCAB)
    found, reasons = {}, {}
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            engine.start(f"{i}/{turn}", prompt, **{"max_new_tokens": 25} | REQUESTS[i % len(REQUESTS)])
        outputs = engine.run()
        reasons |= finishes_of(outputs)
        found |= tokens_of(outputs)
        prompts = [prompt + found[f"{i}/{turn}"] + [i % VOCAB] for i, prompt in enumerate(prompts)]
    return engine, (found, reasons)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return answers(checkpoint)[1]


OPTIONS = [{}, {"overlap": True}, {"page_size": 1, "chunk": 7}, {"page_size": 16, "chunk": 7, "overlap": True},
           {"max_total_tokens": 128, "chunk": 20}, {"radix": False, "max_running": 3},
           {"chunk": 9, "schedule": {"enable_mixed_chunk": True}}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_equal_those_without_drafts(checkpoint, expected, options):
    oracle = TreeOracle(expected[0], VOCAB)
    engine, found = answers(checkpoint, proposer=oracle, max_drafts=9, **options)
    assert found == expected
    assert set(oracle.accepted) >= {1, 2, 3, 4}
    assert (engine.scheduler.batcher.retraction.num_retracted > 0) == ("max_total_tokens" in options)


@pytest.mark.parametrize("options", [*OPTIONS, {"shifted": True}], ids=str)
def test_a_drafter_is_shown_the_accepted_rows(checkpoint, expected, options):
    options = dict(options)
    drafter = TreeDrafter(expected[0], VOCAB, options.get("page_size", 4), shifted=options.pop("shifted", False))
    engine, found = answers(checkpoint, drafter=drafter, max_drafts=7, **options)
    assert found == expected
    assert 0 < engine.drafting.num_accepted < engine.drafting.num_drafted


@pytest.mark.parametrize("model,options", [
    ("gpt_oss", {}), ("gpt_oss", {"chunk": 9, "max_total_tokens": 160}), ("deepseek", {"page_size": 1}),
    ("deepseek", {"kv_cache_dtype": "fp8_e4m3", "page_size": 16}), ("qwen", {"kv_cache_dtype": "fp8_e5m2"})], ids=str)
def test_models_with_windows_and_latents(checkpoint, tmp_path, model, options):
    """Sliding windows of 16 tokens with pages of their own, latents, and float8 caches, with a drafter or without."""
    if model == "gpt_oss":
        save_gpt_oss(tmp_path)
    elif model == "deepseek":
        save_deepseek(tmp_path, 3)
    folder = checkpoint if model == "qwen" else tmp_path
    expected = answers(folder, 8, **options)[1]
    oracle, drafter = TreeOracle(expected[0], VOCAB), TreeDrafter(expected[0], VOCAB, options.get("page_size", 4))
    for given in ({"proposer": oracle, "max_drafts": 9}, {"drafter": drafter, "max_drafts": 7}):
        engine, found = answers(folder, 8, **given, **options)
        assert found == expected
        assert engine.drafting.num_accepted > 50
        assert bool(engine.cache.groups) == (model == "gpt_oss")


def test_two_ranks_move_their_own_heads(checkpoint, expected, tmp_path):
    """And decide alike."""
    ranks = run_ranks(Path(__file__).with_name("tree_rank.py"), 2, tmp_path, str(checkpoint))
    oracle = TreeOracle(expected[0], VOCAB)
    _, found = answers(checkpoint, proposer=oracle, max_drafts=9)
    assert [rank["tokens"] for rank in ranks] == [found[0]] * 2
    assert [rank["accepted"] for rank in ranks] == [oracle.accepted] * 2


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_trees_of_n_grams(checkpoint, expected, match_type):
    proposer = NgramProposer(SpeculativeArgs(speculative_ngram_max_bfs_breadth=4,
                                             speculative_ngram_match_type=match_type))
    engine, found = answers(checkpoint, proposer=proposer, max_drafts=8)
    assert found == expected
    assert engine.drafting.num_accepted > 50


def test_a_chain_of_first_children():
    assert Drafts((1, 2)).chain() == Drafts((1, 2))
    assert Drafts((5, 6, 7, 8, 9), (-1, -1, 1, 0, 3)).chain() == Drafts((5, 8, 9))
