"""The unified scheduler over a real (tiny, random) model: equal tokens however the work is cut up."""

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from baton.common.api.messages import Failed
from baton.tests.helpers.hand_driven import Engine, tokens_of

VOCAB = 96


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3))
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 90, 12)]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    _, model = checkpoint
    answers = {}
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        answers[str(i)] = out[0, len(prompt):].tolist()
    return answers


@pytest.mark.parametrize("options", [
    {}, {"page_size": 1}, {"page_size": 16, "chunk": 7}, {"chunk": 33, "max_running": 3}, {"radix": False},
    {"policy": "lpm", "max_running": 2}, {"max_total_tokens": 128, "chunk": 20}, {"overlap": True},
    {"overlap": True, "chunk": 7, "page_size": 1}, {"overlap": True, "max_total_tokens": 128, "chunk": 20}],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default")
def test_greedy_tokens_equal_transformers(checkpoint, prompts, expected, options):
    engine = Engine(checkpoint[0], **options)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt)
    assert tokens_of(engine.run()) == expected
    for i, prompt in enumerate(prompts):  # again, over the pages in the prefix cache
        engine.start(str(i), prompt)
    outputs = engine.run()
    assert tokens_of(outputs) == expected
    if options.get("radix", True) and "max_total_tokens" not in options:
        page = options.get("page_size", 4)
        hits = {item.rid: item.num_cached_tokens for item in outputs}
        assert all(hits[str(i)] == (len(p) - 1) // page * page for i, p in enumerate(prompts))


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_loses_nothing(checkpoint, prompts, expected, overlap):
    engine = Engine(checkpoint[0], max_total_tokens=160, page_size=4, overlap=overlap)
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt)
    assert tokens_of(engine.run()) == expected
    assert engine.scheduler.batcher.retraction.num_retracted > 0, "the pool was meant to be too small for all"


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_ids_and_limits(checkpoint, prompts, expected, overlap):
    engine = Engine(checkpoint[0], overlap=overlap)
    stop = expected["3"][4]
    cut = expected["3"].index(stop)
    engine.start("stop", prompts[3], stop_token_ids=(stop,))
    engine.start("min", prompts[3], stop_token_ids=(stop,), min_new_tokens=12)
    engine.start("none", prompts[3], max_new_tokens=0)
    outputs = engine.run()
    actual = tokens_of(outputs)
    last = {item.rid: item for item in outputs}
    assert actual["stop"] == expected["3"][: cut + 1]
    assert (last["stop"].finish.reason, last["stop"].finish.matched) == ("stop", stop)
    assert len(actual["min"]) == 12 and stop not in actual["min"][:11]
    assert actual["none"] == [] and last["none"].finish.reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_of_prompt_and_output(checkpoint, prompts, expected, overlap):
    folder, model = checkpoint
    prompt = prompts[5]
    engine = Engine(folder, chunk=9, overlap=overlap)
    engine.start("warm", prompt)
    engine.run()
    want = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    engine.start("a", prompt, logprobs=want)
    outputs = engine.run()
    ids = torch.tensor([prompt + expected["5"]])
    with torch.no_grad():
        reference = model(ids).logits[0].log_softmax(-1)
    first = outputs[0].prompt_logprobs
    assert first.token_ids == prompt and first.values[0] is None
    want_values = [reference[i - 1, token].item() for i, token in enumerate(prompt)][1:]
    assert np.allclose(first.values[1:], want_values, atol=1e-4)
    for step, item in enumerate(outputs):
        row = reference[len(prompt) - 1 + step]
        assert abs(item.logprobs.values[0] - row[item.token_ids[0]].item()) < 1e-4
        assert [token for token, _ in item.logprobs.top[0]] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_seeded_sampling_does_not_depend_on_the_batch(checkpoint, prompts, overlap):
    engine = Engine(checkpoint[0], overlap=overlap)
    engine.start("alone", prompts[2], temperature=1.0, seed=7)
    alone = tokens_of(engine.run())["alone"]
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, temperature=0.8)
    engine.start("mixed", prompts[2], temperature=1.0, seed=7)
    assert tokens_of(engine.run())["mixed"] == alone


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_any_stage_frees_pages(checkpoint, prompts, overlap):
    engine = Engine(checkpoint[0], chunk=8, overlap=overlap)
    reqs = [engine.start(str(i), prompt) for i, prompt in enumerate(prompts)]
    for _ in range(6):
        engine.scheduler.step(0.0)
        engine.scheduler.synchronize()
        req = reqs.pop(0)
        if req.rid in engine.tracker.live:
            engine.scheduler.abort(req, None)
            engine.tracker.drop(req)
    engine.run()


def test_the_request_tracker_refuses_with_a_sentence(checkpoint):
    engine = Engine(checkpoint[0], max_total_tokens=64)
    engine.start("a", [1, 2])
    for rid, prompt, code in (("a", [1], "conflict"), ("b", [], "invalid_request"), ("c", [1] * 60, "invalid_request")):
        assert engine.start(rid, prompt) is None
        failed = engine.sent.pop()
        assert isinstance(failed, Failed) and (failed.rid, failed.code) == (rid, code) and failed.message.endswith(".")
