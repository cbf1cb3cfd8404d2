"""The engine on a GPU: CUDA graphs and overlap change no token."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from baton.common.api.messages import CustomProcessor
from baton.common.config.server import KernelArgs, ModelArgs
from baton.common.models.registry import load_model_spec
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.tinychat.tasks import held_out, matches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EAGER = KernelArgs(disable_cuda_graph=True)
WIDTH = load_model_spec(ModelArgs(model_path=str(CHECKPOINT))).hidden_size


@pytest.fixture(scope="module")
def questions():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    examples = held_out(72, seed=41)
    prompts = []
    for example in examples:
        ids = tokenizer.apply_chat_template(example.messages, tools=example.tools, add_generation_prompt=True)
        prompts.append(list(ids["input_ids"] if not isinstance(ids, list) else ids))
    return tokenizer, examples, prompts


def answer(prompts, seed=None, **options):
    engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=65536, chunk=2048, device="cuda", **options)
    for i, prompt in enumerate(prompts):
        sampling = {} if seed is None else {"temperature": 1.0, "top_p": 0.9, "seed": seed + i}
        engine.start(str(i), prompt, max_new_tokens=96, logprobs={}, **sampling)
    found = tokens_of(engine.run())
    return [found[str(i)] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def reference(questions):
    """Float32, torch attention, no graphs, no overlap."""
    return answer(questions[2], kernels=KernelArgs(attention_backend="torch", disable_cuda_graph=True))


@pytest.mark.parametrize("kernels", [EAGER, KernelArgs(), KernelArgs(cuda_graph_bs=(4, 16)),
                                     KernelArgs(cuda_graph_max_bs=20)], ids=["eager", "graphs", "few sizes", "small"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_tokens_equal_the_plain_loop(questions, reference, kernels, overlap):
    assert answer(questions[2], kernels=kernels, overlap=overlap) == reference


def test_seeded_tokens_equal_the_plain_loop(questions):
    plain = answer(questions[2], seed=5, kernels=EAGER)
    assert answer(questions[2], seed=5, overlap=True) == plain


def test_bfloat16_answers_are_right(questions):
    tokenizer, examples, prompts = questions
    answers = answer(prompts, dtype="bfloat16", overlap=True)
    right = [matches(e, tokenizer.decode(ids, skip_special_tokens=True)) for e, ids in zip(examples, answers)]
    assert sum(right) >= 0.97 * len(right), [e.task for e, ok in zip(examples, right) if not ok]


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")
@pytest.mark.parametrize("kernels", [KernelArgs(decode_attention_backend="flashinfer"), KernelArgs(
    decode_attention_backend="flashinfer", disable_cuda_graph=True)], ids=["graphs", "eager"])
def test_flashinfer_decodes(questions, kernels):
    """A graph's plan is made anew for each replay, whose batches have other lengths than what was captured."""
    tokenizer, examples, prompts = questions
    answers = answer(prompts, dtype="bfloat16", overlap=True, kernels=kernels)
    right = [matches(e, tokenizer.decode(ids, skip_special_tokens=True)) for e, ids in zip(examples, answers)]
    assert sum(right) >= 0.97 * len(right), [e.task for e, ok in zip(examples, right) if not ok]


BUDGET = CustomProcessor("baton.common.sampling.builtin_processors:ThinkingBudget",
                         {"thinking_budget": 5, "end_token_id": 2})


def extras(i, prompt):
    """Hidden states of some requests, a processor that reads pending tokens of some, embeddings in place of some."""
    fields = {"return_hidden_states": i % 3 == 0, "processor": BUDGET if i % 4 == 1 else None}
    if i % 5 == 2:
        rows = np.random.default_rng(i).normal(scale=0.05, size=(len(prompt), WIDTH)).astype("<f4")
        return [0] * len(prompt), {**fields, "input_embeds": rows.tobytes()}
    return prompt, fields


def answer_with_extras(prompts, device="cuda", **options):
    """Tokens and hidden states by request."""
    engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=65536, chunk=512, device=device, **options)
    for i, prompt in enumerate(prompts):
        given, fields = extras(i, prompt)
        engine.start(str(i), given, max_new_tokens=16, fields=fields)
    outputs = engine.run()
    states = {rid: np.frombuffer(b"".join(item.hidden_states or b"" for item in outputs if item.rid == rid), "<f4")
              for rid in {item.rid for item in outputs}}
    return tokens_of(outputs), states


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_processors_hidden_states_and_embeddings(questions, overlap):
    """Decode steps with and without hidden states take turns: some run as CUDA graphs."""
    prompts = questions[2][:24]
    tokens, states = answer_with_extras(prompts, kernels=KernelArgs(attention_backend="torch", disable_cuda_graph=True))
    found, theirs = answer_with_extras(prompts, overlap=overlap)
    assert found == tokens
    for rid, expected in states.items():
        np.testing.assert_allclose(theirs[rid], expected, atol=2e-2)
        wanted = len(prompts[int(rid)]) + len(tokens[rid]) - 1 if int(rid) % 3 == 0 else 0
        assert len(expected) == wanted * WIDTH
