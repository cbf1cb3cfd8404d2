"""Disaggregation with weights and KV cache in float8, over the chat model: what arrives is what was computed."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.common.tinychat import CHECKPOINT
from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.integration.transfer.test_relay_in_process import Side, bootstrap_port, run, tokens_of
from baton.tests.tinychat.tasks import held_out, matches

__all__ = ["bootstrap_port"]
TASKS = ["capitals", "sums", "spell"]


def make_unified(parts):
    return UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=False)


@pytest.fixture(scope="module")
def questions():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    examples = held_out(9, seed=3, tasks=TASKS)
    prompts = [tokenizer.apply_chat_template(example.messages, tokenize=False, add_generation_prompt=True)
               for example in examples]
    return tokenizer, examples, [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]


@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2"])
def test_disaggregated_tokens_equal_unified(questions, bootstrap_port, stored):  # noqa: F811
    tokenizer, examples, prompts = questions
    options = {"groups": 3, "cache": {"kv_cache_dtype": stored}}
    unified = Side(CHECKPOINT, make_unified, "null", 0, "fake", **options)
    for i, prompt in enumerate(prompts):
        unified.start(str(i), prompt, max_new_tokens=24)
    run(unified)
    expected = tokens_of(unified.take()[0])
    pair = [Side(CHECKPOINT, make, mode, bootstrap_port, "nixl", chunk=50, **options)
            for make, mode in ((make_prefill, "prefill"), (make_decode, "decode"))]
    for i, prompt in enumerate(prompts):
        for side in pair:
            side.start(str(i), prompt, room=5000 + i, port=bootstrap_port, max_new_tokens=24)
    run(*pair)
    outputs, failures = pair[1].take()
    assert not failures and tokens_of(outputs) == expected
    sent = pair[0].scheduler.sender.counters["kv_bytes_sent"]
    per_token = 7 * 2 * 4 * 64  # layers, keys and values, heads, values: a byte each
    assert 0 < sent <= per_token * sum(len(prompt) + 3 for prompt in prompts)
    answers = [tokenizer.decode(expected[str(i)]).split(tokenizer.eos_token)[0] for i in range(len(prompts))]
    assert sum(matches(example, answer) for example, answer in zip(examples, answers)) >= len(examples) - 1, answers
    for side in pair:
        side.assert_clean()
        side.scheduler.close()


def test_another_type_is_refused_with_a_sentence(questions, bootstrap_port):  # noqa: F811
    prefill = Side(CHECKPOINT, make_prefill, "prefill", bootstrap_port, "fake", cache={"kv_cache_dtype": "fp8_e4m3"})
    decode = Side(CHECKPOINT, make_decode, "decode", bootstrap_port, "fake")
    decode.start("0", questions[2][0], room=6000, port=bootstrap_port)
    run(prefill, decode)
    _, failures = decode.take()
    assert "dtype of the KV layout is 'float32' here and 'float8_e4m3fn' there" in failures["0"].message
    for side in (prefill, decode):
        side.scheduler.close()
