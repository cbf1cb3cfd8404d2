"""Deterministic mode: a request gets the same bits whatever is computed with it, and however its work is cut up."""

from __future__ import annotations

import random

import pytest
import torch

from baton.common.config.server import SpeculativeArgs
from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.draft_models import save_eagle3
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine
from baton.tests.helpers.small_models import save_model
from baton.tests.helpers.small_moe import save_moe
from baton.tests.helpers.toy_proposer import RepeatLastTokens

LONG = {"max_position_embeddings": 512, "num_hidden_layers": 2}
MODELS = {
    "float32": (lambda folder: save_model(folder, "Qwen3", **LONG), {}),
    "bfloat16": (lambda folder: save_model(folder, "Qwen2", **LONG), {"dtype": "bfloat16"}),
    "float8 weights and cache": (lambda folder: save_model(folder, "Llama", **LONG),
                                 {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}),
    "float8 in blocks": (lambda folder: save_model(folder, "Llama", **LONG, hidden_size=128, intermediate_size=256,
                                                    num_key_value_heads=4),
                         {"quantization": "fp8_per_block"}),
    "experts": (lambda folder: save_moe(folder, "Qwen2Moe", **LONG), {}),
    "experts in float8": (lambda folder: save_moe(folder, "Mixtral", **LONG), {"quantization": "fp8"}),
    "windows, sinks, clamped gates": (lambda folder: save_gpt_oss(folder, **LONG), {}),
    "latents": (lambda folder: save_deepseek(folder, 3, **LONG), {"dtype": "bfloat16"}),
}
SCHEDULES = [
    {"chunk": 7, "radix": True}, {"chunk": 64, "max_running": 3, "overlap": True},
    {"chunk": 48, "schedule": {"enable_mixed_chunk": True}, "page_size": 16}, {"max_total_tokens": 320, "chunk": 33},
]
"""The third decodes while prompts are computed; the last retracts requests."""


@pytest.fixture(autouse=True)
def invariant():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_batch_invariant(True)
    yield
    set_batch_invariant(False)
    torch.set_num_threads(threads)


def requests(count: int = 7) -> dict[str, dict]:
    """Prompts, some of which begin alike, and their parameters: greedy, sampled, truncated, penalized."""
    draw = random.Random(0)
    shared = [draw.randrange(8, 131) for _ in range(70)]
    kinds = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 20},
             {"temperature": 1.0, "seed": 7, "min_p": 0.02, "frequency_penalty": 0.5}]
    found = {}
    for i in range(count):
        own = [draw.randrange(8, 131) for _ in range(draw.choice((1, 9, 60, 150)))]
        found[str(i)] = {"prompt": (shared if i % 2 else []) + own, "ignore_eos": True, "max_new_tokens": 10,
                         "logprobs": {"return_logprob": True, "top_logprobs_num": 1 + i % 3,
                                      "logprob_start_len": 0 if i % 3 == 0 else -1}, **kinds[i % len(kinds)]}
    return found


def answers_of(outputs) -> dict[str, tuple]:
    """Tokens and all log-probabilities of each request."""
    found: dict[str, tuple] = {}
    for item in outputs:
        tokens, values, prompt = found.setdefault(item.rid, ([], [], []))
        tokens += item.token_ids
        if item.logprobs is not None:
            values += zip(item.logprobs.values, item.logprobs.top)
        if item.prompt_logprobs is not None:
            prompt += zip(item.prompt_logprobs.values, item.prompt_logprobs.top)
    return found


def alone(folder, options) -> dict[str, tuple]:
    engine, found = Engine(folder, radix=False, **options), {}
    for rid, request in requests().items():
        engine.start(rid, **request)
        found |= answers_of(engine.run())
    return found


def together(folder, options, seed: int) -> dict[str, tuple]:
    """All requests in random order, beside others, some of them a few steps late; answered twice, so that the second
    time finds its prompts in the prefix cache."""
    draw, engine, found = random.Random(seed), Engine(folder, **options), {}
    for turn in range(2):
        waiting = list(requests().items())
        waiting += [(f"beside {i}", {"prompt": [9 + i] * draw.randrange(1, 90), "ignore_eos": True,
                                     "temperature": i % 2 * 0.9, "max_new_tokens": draw.randrange(1, 16)})
                    for i in range(5)]
        draw.shuffle(waiting)
        while waiting:
            for rid, request in [waiting.pop() for _ in range(min(len(waiting), draw.randrange(1, 5)))]:
                engine.start(f"{turn} {rid}", **request)
            for _ in range(draw.randrange(4)):
                engine.scheduler.step(0.0)
                engine.tracker.flush()
        found |= answers_of(engine.run())
    if options.get("max_total_tokens") and "speculative" not in options:
        assert engine.scheduler.batcher.retraction.num_retracted > 0, "the pool was meant to be too small for all"
    return {rid: answer for rid, answer in found.items() if "beside" not in rid}


def differing(expected: dict[str, tuple], found: dict[str, tuple]) -> list[str]:
    assert len(found) == 2 * len(expected)
    return [rid for rid, answer in found.items() if answer != expected[rid.partition(" ")[2]]]


@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_the_same_bits_in_any_company(tmp_path, name):
    save, options = MODELS[name]
    save(tmp_path)
    expected = alone(tmp_path, options)
    assert all(len(tokens) == len(values) == 10 for tokens, values, _ in expected.values())
    for seed, schedule in enumerate(SCHEDULES):
        assert differing(expected, together(tmp_path, {**options, **schedule}, seed)) == [], schedule


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8 in blocks"])
def test_plain_batches_differ(tmp_path, name):
    """Without the mode the bits depend on the batch: what the tests above compare can differ."""
    set_batch_invariant(False)
    save, options = MODELS[name]
    save(tmp_path)
    assert differing(alone(tmp_path, options), together(tmp_path, {**options, **SCHEDULES[0]}, 0))


@pytest.mark.parametrize("name", ["float32", "windows, sinks, clamped gates", "latents"])
def test_verified_rows_have_the_bits_of_decoded_rows(tmp_path, name):
    save, options = MODELS[name]
    save(tmp_path)
    expected = alone(tmp_path, options)
    speculative = {**options, "proposer": RepeatLastTokens(width=1), "chunk": 50}
    assert differing(expected, together(tmp_path, speculative, 1)) == []
    assert speculative["proposer"].drafted > 0


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_draft_models_change_no_bit(tmp_path, algorithm):
    """Their drafts are of random weights: some are accepted, most are not."""
    target = save_model(tmp_path / "model", "Qwen3", max_position_embeddings=512)
    if algorithm == "EAGLE3":
        save_eagle3(tmp_path / "draft", target)
    else:
        save_model(tmp_path / "draft", "Qwen2", num_hidden_layers=1, max_position_embeddings=512)
    expected = alone(tmp_path / "model", {})
    args = SpeculativeArgs(speculative_algorithm=algorithm, speculative_num_steps=3,
                           speculative_draft_model_path=str(tmp_path / "draft"))
    for seed, schedule in enumerate(({"chunk": 50}, {"chunk": 9, "max_total_tokens": 400, "overlap": True})):
        assert differing(expected, together(tmp_path / "model", {"speculative": args, **schedule}, seed)) == []
