"""Sampling parameters through the whole engine: equal tokens alone, mixed, overlapped, retracted, continued."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from baton.common.api.sampling import SamplingParams
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.sampling_reference import penalized

VOCAB = 96
LENGTH = 24
PENALTIES = {
    "frequency": {"frequency_penalty": 1.1}, "presence": {"presence_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.4}, "bias": {"logit_bias": {3: 4.0, 17: -100.0, 60: 2.5}},
    "all": {"frequency_penalty": 0.5, "presence_penalty": 0.4, "repetition_penalty": 0.8, "logit_bias": {5: 1.5},
            "min_new_tokens": 9, "stop_token_ids": (1, 2, 44)},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3))
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, VOCAB, int(n)).tolist() for name, n in zip(PENALTIES, (40, 9, 25, 2, 60))}


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    """Greedy answers by the definition, each token from a forward pass of its own over all tokens before it."""
    _, model = checkpoint
    answers = {}
    for name, given in PENALTIES.items():
        params = SamplingParams(**{"max_new_tokens": LENGTH, **given})
        prompt, output = prompts[name], []
        while len(output) < LENGTH and not (output and output[-1] in params.stop_token_ids):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + output])).logits[0, -1]
            scores = penalized(logits.tolist(), params, prompt, output)
            if len(output) < params.min_new_tokens:
                for token in params.stop_token_ids:
                    scores[token] = -float("inf")
            output.append(int(np.argmax(scores)))
        answers[name] = output
    return answers


def start(engine, prompts, names=PENALTIES):
    for name in names:
        engine.start(name, prompts[name], **{"max_new_tokens": LENGTH, **PENALTIES[name]})


@pytest.mark.parametrize("options", [
    {}, {"overlap": True}, {"overlap": True, "chunk": 7, "page_size": 1},
    {"max_total_tokens": 120, "chunk": 20}, {"max_total_tokens": 120, "overlap": True}],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default")
def test_greedy_tokens_equal_the_definition(checkpoint, prompts, expected, options):
    engine = Engine(checkpoint[0], **options)
    start(engine, prompts)
    engine.start("plain", prompts["all"], max_new_tokens=LENGTH)
    found = tokens_of(engine.run())
    assert found.pop("plain") != expected["all"]
    assert found == expected
    assert bool(engine.scheduler.batcher.retraction.num_retracted) == ("max_total_tokens" in options)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_that_another_server_began(checkpoint, prompts, expected, overlap):
    """Its tokens stand at the prompt's end, and still count as output."""
    engine = Engine(checkpoint[0], overlap=overlap)
    for name, given in PENALTIES.items():
        done = expected[name][:6]
        left = max(0, given.get("min_new_tokens", 0) - len(done))
        engine.start(name, prompts[name] + done, logprobs={"num_answered": len(done)},
                     **{**given, "max_new_tokens": LENGTH - len(done), "min_new_tokens": left})
    assert tokens_of(engine.run()) == {name: tokens[6:] for name, tokens in expected.items()}


def sampled_requests(count):
    rng = random.Random(5)
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))]
        yield str(i), prompt, {
            "temperature": rng.choice([0.3, 1.0, 1.7]), "seed": rng.randrange(-2**63, 2**63), "max_new_tokens": 8,
            "top_k": rng.choice([-1, 5, 40]), "top_p": rng.choice([1.0, 0.8]), "min_p": rng.choice([0.0, 0.05]),
            "frequency_penalty": rng.choice([0.0, 0.9]), "presence_penalty": rng.choice([0.0, 0.0, 0.6]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
            "logit_bias": rng.choice([{}, {}, {rng.randrange(VOCAB): 2.0}])}


def test_a_hundred_sampled_requests_alone_and_in_mixed_batches(checkpoint):
    requests = list(sampled_requests(100))
    engine = Engine(checkpoint[0])
    alone = {}
    for rid, prompt, params in requests:
        engine.start(rid, prompt, **params)
        alone |= tokens_of(engine.run())
    assert len({tuple(tokens) for tokens in alone.values()}) > 90
    for options in ({"max_total_tokens": 8192}, {"overlap": True, "chunk": 37, "max_running": 23}):
        mixed = Engine(checkpoint[0], **options)
        for rid, prompt, params in random.Random(1).sample(requests, len(requests)):
            mixed.start(rid, prompt, **params)
            if int(rid) % 7 == 0:
                mixed.start(f"unseeded {rid}", prompt, temperature=1.0, max_new_tokens=11)
        found = tokens_of(mixed.run())
        assert {rid: tokens for rid, tokens in found.items() if rid in alone} == alone
