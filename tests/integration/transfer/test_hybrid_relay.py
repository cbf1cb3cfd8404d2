"""Prefill and decode of a hybrid model: the state after the prompt travels."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.kvtransfer.protocol.reshard import RankLayout, find_group_mismatch
from baton.tests.helpers.family_parity import save_random
from baton.tests.helpers.hybrid_models import MAMBA, save_hybrid
from baton.tests.integration.transfer.test_cache_group_relay import answer, pair
from baton.tests.integration.transfer.test_deepseek_relay import make_unified
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, Side, bootstrap_port, run, tokens_of
from baton.tests.kvtransfer.conftest import BACKENDS

__all__ = ["bootstrap_port"]

PAGE = 4
STATES = {"max_mamba_cache_size": 80}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid(folder, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def prompts():
    """With shared beginnings; of one token, and of whole pages."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, VOCAB, 80).tolist()
    return [shared[:n] + rng.integers(0, VOCAB, more).tolist()
            for n, more in ((0, 1), (0, 4), (60, 12), (33, 7), (80, 9), (80, 1), (77, 30))]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    unified = Side(checkpoint, make_unified, "null", 0, "fake", cache=STATES)
    for i, prompt in enumerate(prompts):
        unified.start(str(i), prompt, max_new_tokens=30)
    run(unified)
    return tokens_of(unified.take()[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_those_of_one_server_twice(checkpoint, prompts, expected, bootstrap_port, backend,  # noqa: F811
                                                overlap):
    """In chunks that end within pages; the second time over both prefix caches."""
    with pair(checkpoint, bootstrap_port, backend, chunk=23, overlap=overlap, cache=STATES) as sides:
        for attempt in range(2):
            assert answer(sides, bootstrap_port, prompts, room=100 * attempt) == expected


def test_layers_with_keys_and_a_state(tmp_path, prompts, bootstrap_port):  # noqa: F811
    """Falcon-H1, whose layers are in both cache groups."""
    save_random(tmp_path, "FalconH1", vocab_size=VOCAB, eos_token_id=None, **MAMBA)
    unified = Side(tmp_path, make_unified, "null", 0, "fake", cache=STATES)
    for i, prompt in enumerate(prompts):
        unified.start(str(i), prompt, max_new_tokens=30)
    run(unified)
    with pair(tmp_path, bootstrap_port, chunk=23, overlap=True, cache=STATES) as sides:
        assert answer(sides, bootstrap_port, prompts) == tokens_of(unified.take()[0])


def test_one_state_travels_for_a_prompt(checkpoint, prompts, bootstrap_port):  # noqa: F811
    with pair(checkpoint, bootstrap_port, chunk=16, cache=STATES) as sides:
        sender, receiver = sides[0].scheduler.sender, sides[1].scheduler.receiver
        answer(sides, bootstrap_port, prompts[2:3])
        full, state = (layout.page_bytes for layout in receiver.info.layouts)
        assert sender.counters["kv_bytes_sent"] == full * len(prompts[2]) // PAGE + state


def test_little_memory_retracts_on_decode(checkpoint, prompts, expected, bootstrap_port):  # noqa: F811
    with pair(checkpoint, bootstrap_port, chunk=64, cache=STATES, overlap=True,
              decode_options={"max_total_tokens": 200}) as sides:
        for attempt in range(3):
            assert answer(sides, bootstrap_port, prompts, room=100 * attempt) == expected
        assert sides[1].scheduler.batcher.retraction.num_retracted > 0


def test_servers_compare_their_states(checkpoint, bootstrap_port):  # noqa: F811
    with pair(checkpoint, bootstrap_port, cache=STATES) as sides:
        ours = [RankLayout(1, layout) for layout in sides[1].scheduler.receiver.info.layouts]
    assert find_group_mismatch(ours, ours) is None
    for change, sentence in [({"dtype": "bfloat16"}, "dtype"), ({"page_size": 8}, "same --page-size"),
                             ({"head_dim": 8}, "head_dim")]:
        other = [ours[0], RankLayout(1, msgspec.structs.replace(ours[1].layout, **change))]
        assert sentence in find_group_mismatch(ours, other)
