"""Slots of a draft model's pool are right whenever they are read, whatever becomes of the pages in between."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.config.server.speculative import SpeculativeArgs
from baton.tests.helpers import dict_tier  # noqa: F401 (registers tiers)
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.hash_drafter import HashDrafter
from baton.tests.helpers.small_models import save_model
from baton.tests.helpers.tiers import in_host

VOCAB = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_model(folder, "Qwen3", vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=512, eos_token_id=None)
    return folder


def conversations(engine, turns=3):
    """Few prompts that share beginnings and branch, and what follows their answers, turn by turn; returns all answers,
    and the tokens of prompts that were cached."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCAB, 16).tolist()
    prompts = {}
    for index in range(8):
        shared = system[:4 * int(rng.integers(1, 5))]  # they often branch where a page ends
        prompts[str(index)] = shared + rng.integers(0, 3, int(rng.integers(1, 14))).tolist()
    answers, cached = {}, {}
    for turn in range(turns):
        for name, prompt in prompts.items():
            engine.start(f"{name}.{turn}", prompt, max_new_tokens=9)
        while not engine.scheduler.idle:  # also while a tier loads
            engine.scheduler.step(0.0)
        outputs = engine.run()
        answers |= tokens_of(outputs)
        cached |= {item.rid: item.num_cached_tokens for item in outputs}
        for name, prompt in prompts.items():
            prompt += answers[f"{name}.{turn}"] + rng.integers(0, 3, int(rng.integers(1, 6))).tolist()
    return answers, cached


@pytest.fixture(scope="module")
def expected(checkpoint):
    return conversations(Engine(checkpoint))


@pytest.mark.parametrize("name", ["HASH", "PLAIN_HASH"])
@pytest.mark.parametrize("options", [
    {}, {"page_size": 1, "chunk": 5}, {"page_size": 16, "chunk": 7, "overlap": True},
    {"max_total_tokens": 104, "chunk": 16}, {"radix": False, "max_running": 3},
    {"max_total_tokens": 104, "schedule": {"retract_host_memory_gb": 0.01}},
    {"max_total_tokens": 104, "overlap": True, "tiers": in_host(0.01)},
    {"max_total_tokens": 104, "tiers": in_host(0.01, "slow-dict")},
    {"schedule": {"enable_mixed_chunk": True}, "chunk": 8}], ids=str)
def test_every_slot_that_a_step_may_read_is_right(checkpoint, expected, monkeypatch, name, options):
    """The drafter compares all of them in each step."""
    answers, cached = expected
    monkeypatch.setattr(HashDrafter, "answers", answers)
    engine = Engine(checkpoint, speculative=SpeculativeArgs(name), **options)
    found, found_cached = conversations(engine)
    assert found == answers
    drafter, batcher = engine.runner.drafter, engine.scheduler.batcher
    assert drafter.checked > 1000 and engine.drafting.num_accepted > 50
    if options.get("max_total_tokens"):
        assert batcher.retraction.num_retracted > 0
        assert batcher.swap is None or batcher.swap.num_swapped_out > 0
        assert batcher.loads is None or batcher.loads.num_loaded > 0
    if not options:
        less = [cached[rid] - found_cached[rid] for rid in cached]
        assert min(less) >= 0 and max(less) <= (engine.cache.page_size if name == "HASH" else 0)
