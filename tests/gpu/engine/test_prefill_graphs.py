"""Prompts' steps as CUDA graphs in pieces give the eager ones' logits, and tinychat's tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.runner.cuda_graphs.piecewise_graphs import GraphRecorder, GraphSizes
from baton.common.tinychat import CHECKPOINT
from baton.tests.bench.many_gpus import QWEN3_30B
from baton.tests.common.runner.test_prefill_graphs import SAVE
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.replayed_prompts import SIZES, steps_of
from baton.tests.helpers.small_models import load_runner, save_model, server_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def both(runner) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of the same steps, twice in pieces, each beside the eager ones."""
    runner.prefill_graphs.release()  # those of a server's own sizes
    eager = steps_of(runner)
    runner.prefill_graphs.record(GraphSizes(SIZES, SIZES[-1]), GraphRecorder(runner.device),
                                 lambda what, share: None)
    return [pair for _ in range(2) for pair in zip(steps_of(runner), eager)]


@pytest.mark.parametrize("family", SAVE)
def test_logits_equal_eager_ones(tmp_path, family):
    SAVE[family](tmp_path)
    runner = load_runner(server_config(tmp_path, page_size=4, backend="triton", dtype="float32", num_layer_groups=3),
                         device="cuda:0")
    for found, wanted in both(runner):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_logits_are_near_in_bfloat16(tmp_path, quantization):
    """Over FlashInfer where it is installed. Other tiles of products round a few values otherwise."""
    save_model(tmp_path, "Llama", head_dim=128, num_attention_heads=8, hidden_size=256, intermediate_size=512,
               max_position_embeddings=2048)
    runner = load_runner(server_config(tmp_path, backend="auto", dtype="bfloat16", quantization=quantization),
                         device="cuda:0")
    for found, wanted in both(runner):
        torch.testing.assert_close(found, wanted, atol=0.05 * float(wanted.abs().max()) if len(wanted) else 0, rtol=0)


def test_a_large_mixture_computes_the_same(tmp_path):
    """The kernels of many rows: of a captured size alike, padded nearly."""
    shape = QWEN3_30B | {"num_hidden_layers": 3, "vocab_size": 2048, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    runner = load_runner(server_config(tmp_path, backend="auto", dtype="bfloat16", load_format="dummy"),
                         device="cuda:0")
    tokens = np.random.default_rng(0).integers(0, 2000, 1024)
    pages = np.arange(runner.layout.pages_for(1024), dtype=np.int32)

    def logits_of(count: int) -> torch.Tensor:
        batch = build_forward_batch([Row(tokens[:count], 0, pages)], runner.layout.page_size, runner.device,
                                    list(range(0, count, 7)))
        return runner.forward(batch).clone()

    runner.prefill_graphs.graphs = None
    eager = [logits_of(count) for count in (1024, 700)]
    runner.prefill_graphs.record(GraphSizes([768, 1024], 1024), GraphRecorder(runner.device),
                                 lambda what, share: None)
    logits_of(1024)
    found = [logits_of(count) for count in (1024, 700)]
    assert runner.prefill_graphs.graphs._marked == (768, [700])
    torch.testing.assert_close(found[0], eager[0], atol=0.01 * float(eager[0].abs().max()), rtol=0)
    near = torch.nn.functional.cosine_similarity(found[1], eager[1], dim=-1)
    assert near.median() > 0.999 and near.mean() > 0.98, "a token may go to another expert, few do"


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_tokens_equal_eager_ones(overlap):
    """Chunks of 100 tokens of prompts of all lengths, with a prefix cache, beside decode steps in graphs."""
    prompts = [[(7 * i * j + 3 * j) % 300 + 20 for j in range(4 + 23 * i)] for i in range(16)]
    found = []
    for pieces in ((), (32, 64, 100)):
        engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=16384, chunk=100, device="cuda", overlap=overlap,
                        kernels=KernelArgs("triton", disable_piecewise_cuda_graph=not pieces,
                                           piecewise_cuda_graph_tokens=pieces))
        assert (engine.runner.prefill_graphs.graphs is not None) == bool(pieces)
        for i, prompt in enumerate(prompts):
            engine.start(str(i), prompt, max_new_tokens=24, ignore_eos=True)
        found.append(tokens_of(engine.run()))
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_cached_prefixes_and_logprobs_of_prompts(overlap):
    """Of the second turn's prompts most begin behind what the prefix cache has; every third one's logprobs are wanted,
    so that it is computed whole."""
    prompts = [[(7 * i * j + 3 * j) % 300 + 20 for j in range(90 + 23 * i)] for i in range(6)]
    found = []
    for pieces in ((), (32, 64, 100)):
        engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=16384, chunk=100, device="cuda", overlap=overlap,
                        kernels=KernelArgs("triton", disable_piecewise_cuda_graph=not pieces,
                                           piecewise_cuda_graph_tokens=pieces))
        outputs = []
        for turn in range(2):
            for i, prompt in enumerate(prompts):
                longer = prompt if turn == 0 else prompt + tokens_of(outputs)[f"0-{i}"] + [30 + i] * 40
                wanted = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [50],
                          "logprob_start_len": -1 if i % 3 else 0}
                engine.start(f"{turn}-{i}", longer, max_new_tokens=12, ignore_eos=True, logprobs=wanted)
            outputs += engine.run()
        found.append((tokens_of(outputs), {item.rid: item.num_cached_tokens for item in outputs}, values_of(outputs)))
    (tokens, cached, values), (others, theirs, near) = found
    assert tokens == others and cached == theirs
    assert [cached[f"1-{i}"] > 80 for i in range(6)] == [i % 3 > 0 for i in range(6)]
    assert len(values) > 1000
    np.testing.assert_allclose(near, values, atol=1e-3)


def values_of(outputs) -> list[float]:
    """All that is told of logprobs, in order."""
    told = [part for item in sorted(outputs, key=lambda item: item.rid)
            for part in (item.prompt_logprobs, item.logprobs) if part is not None]
    return [value for part in told for value in
            (*part.values, *(pair[1] for pairs in (*part.top, *part.of_ids) for pair in pairs or ()))
            if value is not None]
