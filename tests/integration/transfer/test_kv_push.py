"""What leaves a prefill server when, by --kv-transfer-overlap: every page that decode lacks, once, none too early."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from baton.common.kvcache.cache_group import CacheGroup, SlidingWindow
from baton.common.kvcache.manager import KVCacheManager
from baton.common.request.step_input import Chunk
from baton.prefill.kv_push import KVPush

PAGE, GROUPS = 4, 3
CACHE = SimpleNamespace(page_size=PAGE, pages_for=lambda tokens: -(-tokens // PAGE), groups=[])


def request(room, num_pages, num_cached):
    page_table = SimpleNamespace(ids=np.arange(num_pages) + 100 * room, num_cached_pages=num_cached, groups=[])
    return SimpleNamespace(page_table=page_table, bootstrap=SimpleNamespace(room=room))


def pushed(overlap, *batches):
    """What each batch and each of its layer groups pushed: ``(when, room, group, first, pages, event)``."""
    told, now = [], [""]
    sender = SimpleNamespace(push=lambda room, group, first, ids, ready: told.append(
        (now[0], room, group, first, [int(i) - 100 * room for i in ids], ready)))
    kv_push = KVPush(sender, CACHE, [GROUPS], overlap, lambda: "launched")
    for number, chunks in enumerate(batches):
        now[0] = f"before {number}"
        kv_push.push_cached(chunks)
        push = kv_push.callback_for(chunks)
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


@pytest.mark.parametrize("overlap", ["layers", "chunk", "prompt"])
def test_pages_behind_the_window_at_the_prompts_end_never_leave(overlap):
    """Two cache groups of one and two layer groups; the prompt's first pages are cached here."""
    window = CacheGroup(SlidingWindow(6), 30, PAGE)
    cache = KVCacheManager(40, PAGE, groups=[window])
    prompt = np.arange(27, dtype=np.int32)
    earlier = cache.match_prefix(prompt, 0)
    assert cache.allocate_slots(earlier, 24) and cache.allocate_chunk(earlier, 0, 24) == 24
    cache.release(earlier, prompt[:24])
    table = cache.match_prefix(prompt, 24)
    assert table.num_cached_pages == 6 and cache.allocate_slots(table, 27) and cache.allocate_chunk(table, 24, 27) == 27
    req = SimpleNamespace(page_table=table, bootstrap=SimpleNamespace(room=1), num_prompt_tokens=27)
    sent = {group: [] for group in range(3)}
    sender = SimpleNamespace(push=lambda room, group, first, ids, ready: sent[group].extend(
        zip(range(first, first + len(ids)), ids.tolist())))
    kv_push = KVPush(sender, cache, [1, 2], overlap, lambda: None)
    chunks = [Chunk(req, 24, 27, True)]
    kv_push.push_cached(chunks)
    push = kv_push.callback_for(chunks)
    for group in (1, 0, 2):  # in the order of their last layers
        push(group, None)
    assert sent[0] == list(enumerate(table.ids.tolist()))
    assert sent[1] == sent[2] == list(zip((5, 6), table.groups[0].span(5, 7).tolist()))
    sent.update({group: [] for group in range(3)})
    kv_push.push_retained(req)
    assert sent[0] == list(enumerate(table.ids.tolist())) and len(sent[1]) == len(sent[2]) == 2


@pytest.mark.parametrize("overlap", ["layers", "chunk", "prompt"])
def test_the_drafts_pages_are_pushed_after_its_own_layers(overlap):
    """They are those of the first cache group, by the model's page ids; the draft's one layer group is the last."""
    cache = KVCacheManager(40, PAGE, lookahead=1)
    prompt = np.arange(10, dtype=np.int32)
    table = cache.match_prefix(prompt, 0)
    assert cache.allocate_slots(table, 10)
    req = SimpleNamespace(page_table=table, bootstrap=SimpleNamespace(room=1), num_prompt_tokens=10)
    sent = []
    sender = SimpleNamespace(push=lambda room, group, first, ids, ready: sent.append((group, first, len(ids), ready)))
    kv_push = KVPush(sender, cache, [2], overlap, lambda: "now", draft_groups=1)
    push = kv_push.callback_for([Chunk(req, 0, 10, True)])
    counts = []
    for group in range(3):
        push(group, f"event {group}")
        counts.append(len(sent))
    pages = cache.pages_for(10)
    if overlap == "layers":
        assert counts == [1, 2, 3] and sent == [(group, 0, pages, f"event {group}") for group in range(3)]
    else:
        assert counts == [0, 0, 3] and sent == [(group, 0, pages, "event 2") for group in range(3)]
    sent.clear()
    kv_push.push_retained(req)
    assert sent == [(group, 0, pages, "now") for group in range(3)]
