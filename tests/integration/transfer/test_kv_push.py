"""What leaves a prefill server when, by --kv-transfer-overlap: every page that decode lacks, once, none too early."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from baton.common.request.step_input import Chunk
from baton.prefill.kv_push import KVPush

PAGE, GROUPS = 4, 3
CACHE = SimpleNamespace(page_size=PAGE, pages_for=lambda tokens: -(-tokens // PAGE))


def request(room, num_pages, num_cached):
    page_table = SimpleNamespace(ids=np.arange(num_pages) + 100 * room, num_cached_pages=num_cached)
    return SimpleNamespace(page_table=page_table, bootstrap=SimpleNamespace(room=room))


def pushed(overlap, *batches):
    """What each batch and each of its layer groups pushed: ``(when, room, group, first, pages, event)``."""
    told, now = [], [""]
    sender = SimpleNamespace(push=lambda room, group, first, ids, ready: told.append(
        (now[0], room, group, first, [int(i) - 100 * room for i in ids], ready)))
    kv_push = KVPush(sender, CACHE, GROUPS, overlap, lambda: "launched")
    for number, chunks in enumerate(batches):
        batch = SimpleNamespace(chunks=chunks)
        now[0] = f"before {number}"
        kv_push.push_cached(batch)
        push = kv_push.callback_for(batch)
        for group in range(GROUPS):
            now[0] = f"{number}.{group}"
            push(group, f"event {number}.{group}")
    return told


@pytest.fixture
def two_chunks():
    """A prompt of 18 tokens, of which a page is cached: tokens 4 to 13, and 13 to 18."""
    req = request(1, 5, 1)
    return [Chunk(req, 4, 13, False)], [Chunk(req, 13, 18, True)]


def test_layers_leave_group_by_group(two_chunks):
    told = pushed("layers", *two_chunks)
    assert told[:3] == [("before 0", 1, group, 0, [0], "launched") for group in range(GROUPS)]
    assert told[3:] == [(f"{chunk}.{group}", 1, group, first, pages, f"event {chunk}.{group}")
                        for chunk, first, pages in ((0, 1, [1, 2]), (1, 3, [3, 4])) for group in range(GROUPS)]


def test_chunks_leave_when_their_last_group_is_computed(two_chunks):
    told = pushed("chunk", *two_chunks)
    assert told[3:] == [(f"{chunk}.2", 1, group, first, pages, f"event {chunk}.2")
                        for chunk, first, pages in ((0, 1, [1, 2]), (1, 3, [3, 4])) for group in range(GROUPS)]


def test_prompts_leave_whole(two_chunks):
    assert pushed("prompt", *two_chunks) == [
        ("1.2", 1, group, 0, [0, 1, 2, 3, 4], "event 1.2") for group in range(GROUPS)]


def test_a_prompt_leaves_when_it_is_complete_and_not_with_its_neighbours():
    long, short = request(1, 3, 0), request(2, 1, 0)
    told = pushed("prompt", [Chunk(long, 0, 7, False), Chunk(short, 0, 3, True)], [Chunk(long, 7, 9, True)])
    assert [(when, room, pages) for when, room, group, _, pages, _ in told if group == 0] == [
        ("0.2", 2, [0]), ("1.2", 1, [0, 1, 2])]
