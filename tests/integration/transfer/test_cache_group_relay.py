"""Prefill and decode whose layers with a sliding window have a cache group of their own."""

from __future__ import annotations

import contextlib
import json
import time

import numpy as np
import pytest

from baton.common.config.server.tiers import WRITE_POLICIES
from baton.common.kvcache.tiers import host
from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.helpers.gpt_oss_models import WINDOW, save_gpt_oss
from baton.tests.helpers.late_copies import LateCopies
from baton.tests.helpers.tiers import in_host
from baton.tests.integration.transfer.test_deepseek_relay import make_unified
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, Side, bootstrap_port, run, tokens_of
from baton.tests.kvtransfer.conftest import BACKENDS

__all__ = ["bootstrap_port"]

PAGE = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    save_gpt_oss(folder, vocab_size=VOCAB, eos_token_id=None)
    return folder


@pytest.fixture(scope="module")
def prompts():
    """Up to nine windows long, with shared beginnings."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, VOCAB, 100).tolist()
    lengths = (0, WINDOW - 1, 33, 60, 99, 100, 47, 100)
    return [shared[:n] + rng.integers(0, VOCAB, int(rng.integers(1, 45))).tolist() for n in lengths]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    unified = Side(checkpoint, make_unified, "null", 0, "fake", cache={"disable_hybrid_swa_memory": True})
    for i, prompt in enumerate(prompts):
        unified.start(str(i), prompt, max_new_tokens=30)
    run(unified)
    return tokens_of(unified.take()[0])


@contextlib.contextmanager
def pair(checkpoint, port, backend="fake", *, decode_options=None, **options):
    prefill = Side(checkpoint, make_prefill, "prefill", port, backend, **options)
    decode = Side(checkpoint, make_decode, "decode", port, backend, **{**options, **(decode_options or {})})
    try:
        yield prefill, decode
    finally:
        prefill.scheduler.close()
        decode.scheduler.close()


def answer(sides, port, prompts, room=0):
    prefill, decode = sides
    for i, prompt in enumerate(prompts):
        for side in sides:
            side.start(str(i), prompt, max_new_tokens=30, room=room + i, port=port)
    run(*sides)
    outputs, failures = decode.take()
    assert not failures and not prefill.take()[1], failures
    for side in sides:
        side.assert_clean()
        group, = side.cache.groups
        assert group.num_reserved == group.num_in_tables == group.num_read == group.num_allocated == 0
    return tokens_of(outputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_those_of_one_pool_twice(checkpoint, prompts, expected, bootstrap_port, backend,  # noqa: F811
                                              overlap):
    """In chunks that end within pages and windows; the second time over both prefix caches."""
    with pair(checkpoint, bootstrap_port, backend, chunk=23, overlap=overlap) as sides:
        assert answer(sides, bootstrap_port, prompts) == expected
        sent = sides[0].scheduler.sender.counters["kv_bytes_sent"]
        assert answer(sides, bootstrap_port, prompts, room=100) == expected
        assert sides[0].scheduler.sender.counters["kv_bytes_sent"] < 1.5 * sent


@pytest.mark.parametrize("swaps", [False, True])
def test_little_memory(checkpoint, prompts, expected, bootstrap_port, swaps):  # noqa: F811
    """Decode retracts, and prefill computes long prompts within a few windows' pages."""
    decode_options = {"schedule": {"retract_host_memory_gb": 0.01}} if swaps else {}
    with pair(checkpoint, bootstrap_port, chunk=64, max_total_tokens=400, cache={"swa_full_tokens_ratio": 0.2},
              decode_options=decode_options) as sides:
        for attempt in range(3):
            assert answer(sides, bootstrap_port, prompts, room=100 * attempt) == expected


@pytest.mark.parametrize("policy", WRITE_POLICIES.names)
def test_host_memory_behind_little_memory(checkpoint, prompts, expected, bootstrap_port, monkeypatch,  # noqa: F811
                                          policy):
    """On both sides. Prefill's writes into decode's pages wait for copies of what was in them, which are late."""
    made, rng = [], np.random.default_rng(WRITE_POLICIES.names.index(policy))

    def copies(context, memory):
        made.append(LateCopies(context, memory))
        return made[-1]

    monkeypatch.setattr(host, "HostPageCopies", copies)
    with pair(checkpoint, bootstrap_port, chunk=64, max_total_tokens=400, cache={"swa_full_tokens_ratio": 0.2},
              tiers=in_host(0.01, hicache_load_policy="always", hicache_write_policy=policy)) as sides:
        for side in sides:
            step = side.scheduler.step
            side.scheduler.step = lambda now, step=step: (step(now), [each.run_some(rng) for each in made])[0]
        for attempt in range(3):
            assert answer(sides, bootstrap_port, prompts, room=100 * attempt) == expected
        assert sum(side.cache.tier.counters.stored for side in sides) > 20
        for side in sides:
            side.cache.tier.check_integrity()
        assert sum(side.scheduler.batcher.loads.num_loaded for side in sides) > 20


def test_the_next_turn_finds_answers_of_many_windows_in_the_storage(checkpoint, bootstrap_port, tmp_path):  # noqa: F811
    """Decode has written the pages of its answer, those of windows that it had left included."""
    extra = {"storage_dir": str(tmp_path), "min_free_space": 0, "use_direct_io": False, "prefetch_threshold": PAGE,
             "stall_seconds": 30}
    tiers = in_host(0.01, hicache_load_policy="always", hicache_storage_backend="file",
                    hicache_storage_prefetch_policy="wait_complete",
                    hicache_storage_backend_extra_config=json.dumps(extra))
    text = np.random.default_rng(7).integers(0, VOCAB, 30).tolist()
    with pair(checkpoint, bootstrap_port, chunk=23, tiers=tiers) as sides:
        for turn in range(3):
            for side in sides:
                req = side.start("0", text, max_new_tokens=4 * WINDOW, room=turn, port=bootstrap_port)
                if side is sides[0]:
                    prompt = req
            run(*sides)
            outputs, failures = sides[1].take()
            sides[0].take()
            assert not failures
            assert not turn or prompt.num_cached_tokens >= len(text) - 3 - 2 * PAGE
            text = [*text, *tokens_of(outputs)["0"], 1, 2, 3]
            end = time.monotonic() + 30
            for side in sides:
                while side.cache.tier.busy or side.scheduler.batcher.loads.prefetches.storage.num_queued_writes:
                    side.scheduler.step(0.0)
                    assert time.monotonic() < end
                side.cache.flush()
        for side in sides:
            side.scheduler.batcher.loads.close()


def test_the_window_of_a_branch_travels_and_the_rest_of_its_prompt_does_not(checkpoint, prompts, expected,
                                                                             bootstrap_port):  # noqa: F811
    """Decode has the beginning of a prompt in the group that reads all tokens, not the window before its branch."""
    with pair(checkpoint, bootstrap_port) as sides:
        sender, receiver = sides[0].scheduler.sender, sides[1].scheduler.receiver
        answer(sides, bootstrap_port, prompts[7:8])
        before = sender.counters["kv_bytes_sent"]
        tokens = answer(sides, bootstrap_port, prompts[3:4], room=50)
        assert tokens["0"] == expected["3"]
        full, windowed = (layout.page_bytes for layout in receiver.info.layouts)
        pages, shared = -(-len(prompts[3]) // PAGE), 60 // PAGE
        window_pages = pages - (len(prompts[3]) + 1 - WINDOW) // PAGE
        sent = sender.counters["kv_bytes_sent"] - before
        assert sent == full * (pages - shared) + windowed * window_pages


def test_a_retained_prompt_is_sent_again(checkpoint, prompts, expected, bootstrap_port):  # noqa: F811
    """Another decode server asks for a prompt whose first one has ended before it acknowledged."""
    with pair(checkpoint, bootstrap_port) as (prefill, decode):
        decode.scheduler.receiver.acknowledge = lambda room: None  # as one that dies before its first token
        answer((prefill, decode), bootstrap_port, prompts[4:5], room=1)
        other = Side(checkpoint, make_decode, "decode", bootstrap_port, "fake")
        try:
            for side in (prefill, other):
                req = side.start("0", prompts[4], max_new_tokens=30, room=2, port=bootstrap_port)
                req.bootstrap = type(req.bootstrap)(req.bootstrap.host, req.bootstrap.port, 2, previous=1)
            run(prefill, other)
            assert tokens_of(other.take()[0])["0"] == expected["4"]
            assert prefill.scheduler.counters["reused_prompts"] == 1
            prefill.take()
        finally:
            other.scheduler.close()


@pytest.mark.parametrize("on_prefill", [False, True])
def test_one_pool_on_one_side_is_refused(checkpoint, prompts, bootstrap_port, on_prefill):  # noqa: F811
    single = {"disable_hybrid_swa_memory": True}
    with pair(checkpoint, bootstrap_port, cache=single if on_prefill else {},
              decode_options={"cache": {} if on_prefill else single}) as sides:
        for side in sides:
            side.start("0", prompts[1], room=1, port=bootstrap_port)
        run(sides[1])
        _, failures = sides[1].take()
        assert "give --disable-hybrid-swa-memory to both servers or to neither" in failures["0"].message
        sides[0].abort(next(iter(sides[0].tracker.live.values())))
        run(sides[0])
