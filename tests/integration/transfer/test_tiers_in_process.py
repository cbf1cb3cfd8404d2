"""Turns of conversations over pairs with a storage: the next turn's prefill finds prompts and answers, whichever
servers computed them."""

from __future__ import annotations

import json

from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.helpers.tiers import in_host
from baton.tests.integration.transfer.test_relay_in_process import (  # noqa: F401 (fixtures)
    VOCAB,
    Side,
    bootstrap_port,
    checkpoint,
    prompts,
    run,
    tokens_of,
    unified,
)

PAGE = 4


def stored_in(folder, **flags):
    extra = {"storage_dir": str(folder), "min_free_space": 0, "use_direct_io": False, "prefetch_threshold": PAGE,
             "stall_seconds": 30}  # cores are shared: a thread may wait for one
    return in_host(0.02, hicache_load_policy="always", hicache_storage_backend="file",
                   hicache_storage_backend_extra_config=json.dumps(extra), **flags)


def make_pair(checkpoint, port, folder, **options):  # noqa: F811
    return (Side(checkpoint, make_prefill, "prefill", port, "fake", chunk=23, tiers=stored_in(
                folder, hicache_storage_prefetch_policy="wait_complete"), **options),
            Side(checkpoint, make_decode, "decode", port, "fake", tiers=stored_in(folder), **options))


def ask(pair, asked, port, room, **fields):
    for i, prompt in enumerate(asked):
        for side in pair:
            side.start(str(i), prompt, room=room + i, port=port, **fields)
    run(*pair)
    outputs, failures = pair[1].take()
    pair[0].take()
    assert not failures
    for side in pair:
        side.assert_clean()
        side.scheduler.batcher.loads.flush()
        side.cache.poll_tier()
    return tokens_of(outputs), {each.rid: each.extras.usage for each in outputs if each.extras and each.extras.usage}


def close(pair):
    for side in pair:
        side.scheduler.batcher.loads.close()
        side.scheduler.close()


def answers_of(unified, asked):  # noqa: F811
    for i, prompt in enumerate(asked):
        unified.start(str(i), prompt)
    run(unified)
    return tokens_of(unified.take()[0])


def test_the_next_turn_finds_prompts_and_answers_in_the_storage(checkpoint, bootstrap_port, prompts, tmp_path,  # noqa: F811
                                                                unified):  # noqa: F811
    """Two turns on a pair, the third on another one that has computed nothing."""
    turns, rooms = [list(prompt) for prompt in prompts], 5000
    pair = make_pair(checkpoint, bootstrap_port, tmp_path)
    for turn in range(3):
        if turn == 2:
            close(pair)
            pair = make_pair(checkpoint, bootstrap_port, tmp_path)
        answers, usages = ask(pair, turns, bootstrap_port, rooms + 100 * turn)
        assert answers == answers_of(unified, turns)
        before = [len(prompt) + len(answers[str(i)]) - 1 for i, prompt in enumerate(turns)]  # the last is not computed
        if turn == 2:
            break
        turns = [[*prompt, *answers[str(i)], (7 * i + turn) % VOCAB, 5, 9] for i, prompt in enumerate(turns)]
        found = sum(count // PAGE for count in before)
    loads = pair[0].scheduler.batcher.loads
    assert loads.num_loaded_stored == loads.num_loaded >= 0.99 * found
    assert sum(usage.loaded.storage for usage in usages.values()) == loads.num_loaded * PAGE
    for usage in usages.values():
        assert usage.loaded.storage_backend == "file" and not usage.loaded.host
        assert usage.loaded.storage <= usage.num_cached_tokens
    close(pair)
