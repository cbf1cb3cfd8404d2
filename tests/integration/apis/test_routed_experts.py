"""The experts of each token (--enable-return-routed-experts), through a pair of servers: those of transformers."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
import transformers

from baton.tests.helpers.harness import Cluster, post_json

LAYERS, TOP_K, EXPERTS = 3, 2, 8
PROMPT = [(7 * i) % 128 + 3 for i in range(50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random mixture whose first layer has no experts."""
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        mlp_only_layers=[0], max_position_embeddings=512, eos_token_id=1, bos_token_id=2)
    made = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    folder = tmp_path_factory.mktemp("experts") / "model"
    made.save_pretrained(folder)
    return made, folder


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    flags = ["--model-path", str(model[1]), "--skip-tokenizer-init", "--max-total-tokens", "2048", "--page-size", "16",
             "--enable-return-routed-experts"]
    with Cluster(tmp_path_factory.mktemp("pair"), flags=flags, prefill_flags=["--chunked-prefill-size", "20"]) as made:
        yield made


def expected(model, tokens):
    """``[positions, layers with experts, top_k]``, sorted: equal scores have no order."""
    with torch.inference_mode():
        found = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    return np.stack([each.topk(TOP_K).indices.sort(-1).values.numpy() for each in found], axis=1)


def experts_of(answer):
    rows = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    return rows.reshape(-1, LAYERS, TOP_K)


def ask(cluster, **fields):
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}}
    return post_json(cluster.url + "/generate", body | fields)


def test_they_are_those_of_transformers(cluster, model):
    """The second time the prompt is in the prefix caches, and is computed all the same."""
    for _ in range(2):
        status, answer = ask(cluster, return_routed_experts=True)
        assert status == 200, answer
        found, wanted = experts_of(answer), expected(model[0], PROMPT + answer["output_ids"])
        assert found.shape == (len(PROMPT) + 9 - 1, LAYERS, TOP_K) and not found[:, 0].any()
        assert np.array_equal(np.sort(found[:, 1:], -1), wanted)
    status, cropped = ask(cluster, return_routed_experts=True, routed_experts_start_len=40)
    assert status == 200 and np.array_equal(experts_of(cropped), found[40:])


def test_each_request_of_a_batch_has_its_own(cluster, model):
    prompts = [PROMPT[:11], PROMPT[5:40], PROMPT[20:]]
    status, answers = ask(cluster, input_ids=prompts, return_routed_experts=[True, False, True])
    assert status == 200 and "routed_experts" not in answers[1]["meta_info"]
    for prompt, answer in zip(prompts, answers):
        if "routed_experts" in answer["meta_info"]:
            wanted = expected(model[0], prompt + answer["output_ids"])
            assert np.array_equal(np.sort(experts_of(answer)[:, 1:], -1), wanted)


def test_bad_requests(cluster):
    for fields, words in (({"routed_experts_start_len": -1}, "must be 0 or more"),
                          ({"sampling_params": {"max_new_tokens": 400}, "input_ids": PROMPT * 40}, "context")):
        status, answer = ask(cluster, return_routed_experts=True, **fields)
        assert status == 400 and words in answer["error"]["message"], answer
    status, answer = post_json(cluster.url + "/v1/completions", {"prompt": PROMPT, "return_routed_experts": True})
    assert status == 400 and "/generate takes it" in answer["error"]["message"]
