"""What the chat model knows it still knows in float8."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.tinychat.tasks import held_out, matches


def share_right(count: int, seed: int, **options) -> float:
    """Of held-out questions, all tasks taking turns, by an engine in this process."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    examples = held_out(count, seed)
    engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=max(16_384, 600 * count), chunk=2048, **options)
    for i, example in enumerate(examples):
        prompt = tokenizer.apply_chat_template(example.messages, tools=example.tools, add_generation_prompt=True)
        engine.start(str(i), prompt if isinstance(prompt, list) else prompt["input_ids"], max_new_tokens=192)
    answers = tokens_of(engine.run())
    right = [matches(example, tokenizer.decode(answers[str(i)], skip_special_tokens=True))
             for i, example in enumerate(examples)]
    return sum(right) / len(right)


def test_short():
    assert share_right(12, 5, quantization="fp8", kv_cache_dtype="fp8_e4m3") >= 11 / 12


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor"])
def test_within_a_point(quantization, kv_cache_dtype):
    exact = share_right(240, 6, dtype="bfloat16")
    found = share_right(240, 6, dtype="bfloat16", quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    assert found >= exact - 0.01
