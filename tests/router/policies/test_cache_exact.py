"""cache_exact: kv_index from events, pages of texts, choices of workers and pairs, real subscriptions."""

from __future__ import annotations

import asyncio
import json
from random import Random

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from baton.common.api.kv_events import (
    PROMPT_PAGES_HEADER,
    Cleared,
    PromptPages,
    Removed,
    Stored,
    decode_pages,
    encode,
    encode_pages,
    page_hashes,
)
from baton.common.api.namespace import SHARED, Namespace
from baton.common.engine.kv_event_publisher import KVEventPublisher
from baton.common.kvcache.manager import KVCacheManager
from baton.router.config.endpoint import Endpoint
from baton.router.monitoring.kv_event_watch import Source, source_of
from baton.router.net.body import routing_fields
from baton.router.net.request import Request
from baton.router.net.upstream_response import ResponseFacts, ResponseHead
from baton.router.policies.base import Decision
from baton.router.policies.cache_aware import PrefixMemory
from baton.router.policies.cache_exact import CacheExact
from baton.router.policies.page_costs import KVMemory
from baton.router.policies.text_pages import TextPages, text_blocks
from baton.router.policies.worker_groups import WorkerGroups
from baton.router.workers.kv_index import KVIndex
from baton.router.workers.memory_report import MemoryReport
from baton.router.workers.registry import Worker
from baton.tests.helpers.ports import free_ports

PAGE = 16


def workers(count: int, host: str = "w") -> tuple[Worker, ...]:
    return tuple(Worker(Endpoint.parse(f"http://{host}{i}:80")) for i in range(count))


def ids(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(30_000) for _ in range(count)]


def stored(tokens: list[int]) -> Stored:
    hashes = page_hashes(tokens, PAGE)
    return Stored(hashes, None, tokens[:len(hashes) * PAGE], PAGE)


def numbered(tokens: list[int]):
    return ((page, [value]) for page, value in enumerate(page_hashes(tokens, PAGE), 1))


def read(policy: CacheExact, body: dict):
    request = Request()
    request.body = json.dumps(body).encode()
    return policy.read(request, routing_fields(request.body)), request


# ---------------------------------------------------------------------- kv_index


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["store", "remove", "clear"]), st.integers(0, 5),
                          st.integers(1, 8)), max_size=40))
def test_the_kv_index_is_what_the_events_say(steps):
    """Against plain sets: any order of events, three workers, prompts that share their first 64 tokens."""
    kv_index, model = KVIndex(), {0: set(), 1: set(), 2: set()}
    prompts = [ids(0, 64) + ids(seed, 64) for seed in range(1, 7)]
    for worker, kind, prompt, pages in steps:
        hashes = page_hashes(prompts[prompt], PAGE)[:pages]
        if kind == "store":
            kv_index.apply(worker, [Stored(hashes, None, prompts[prompt][:pages * PAGE], PAGE)])
            model[worker] |= set(hashes)
        elif kind == "remove":
            removed = [value for value in hashes[-1:] if value in model[worker]]
            kv_index.apply(worker, [Removed(removed)])
            model[worker] -= set(removed)
        else:
            kv_index.apply(worker, [Cleared()])
            model[worker].clear()
    for tokens in prompts:
        for worker, pages in model.items():
            expected = 0
            for value in page_hashes(tokens, PAGE):
                if value not in pages:
                    break
                expected += 1
            assert kv_index.match(numbered(tokens)).get(worker, 0) == expected
    assert {w: n for w, n in kv_index.sizes.items() if n} == {w: len(s) for w, s in model.items() if s}
    for worker in model:
        kv_index.forget(worker)
    assert len(kv_index) == 0


def test_other_engines_hashes_lead_to_the_same_pages():
    """vLLM's hashes are bytes of its own making; what counts is the tokens."""
    kv_index, tokens = KVIndex(), ids(1, 64)
    kv_index.apply(7, [Stored([b"a", b"b"], None, tokens[:32], PAGE), Stored([b"c"], b"b", tokens[32:48], PAGE),
                        Stored([b"x"], b"unknown", tokens[48:], PAGE)], native=False)
    assert kv_index.match(numbered(tokens)) == {7: 3}
    kv_index.apply(7, [Removed([b"c", b"never"])], native=False)
    assert kv_index.match(numbered(tokens)) == {7: 2}


def test_a_chain_is_read_no_further_than_it_is_held():
    kv_index, tokens = KVIndex(), ids(1, 160)
    kv_index.apply(1, [stored(tokens[:32])])
    steps = iter(list(numbered(tokens)))
    kv_index.match(steps)
    assert next(steps)[0] == 4


# ---------------------------------------------------------------------- texts


def words(seed: int, count: int) -> tuple[str, list[int]]:
    """A text and its tokens: words of 1 to 9 letters, one token each, so that bytes and tokens drift apart."""
    rng = Random(seed)
    tokens = [rng.randrange(10_000) for _ in range(count)]
    return "".join(chr(97 + token % 26) * (1 + token % 9) + " " for token in tokens), tokens


def learn(texts: TextPages, text: str, tokens: list[int]) -> None:
    texts.learn(text_blocks(text.encode()), len(text), decode_pages(encode_pages(tokens, PAGE)))


def test_a_text_that_was_learnt_is_known_to_its_last_page():
    texts, (text, tokens) = TextPages(10_000), words(1, 1000)
    learn(texts, text, tokens)
    blocks = text_blocks(text.encode())
    assert texts.knows(blocks)
    assert texts.pages_of(blocks)[-1] == (62, page_hashes(tokens, PAGE)[-1])


def test_pages_of_a_shared_beginning_become_shared_pages():
    """Pages that the texts do not share are unlearnt, shared ones stay known but for a few."""
    texts, (system, system_ids) = TextPages(10_000), words(0, 800)
    chats = []
    for seed in range(1, 20):
        question, question_ids = words(seed, 20 * seed)
        chats.append((system + question, system_ids + question_ids))
        learn(texts, *chats[-1])
    question, question_ids = words(99, 300)
    true = page_hashes(system_ids + question_ids, PAGE)
    chain = texts.pages_of(text_blocks((system + question).encode()))
    assert all(true[pages - 1] == value for pages, value in chain)
    assert chain[-1][0] >= 40  # of 50 that are shared


def test_text_memory_is_bounded():
    texts = TextPages(500)
    for seed in range(50):
        learn(texts, *words(seed, 1000))
    assert len(texts) <= 500


@given(st.binary(max_size=3000), st.integers(0, 40), st.integers(1, 5))
def test_any_lesson_can_be_learnt(text, count, stride):
    texts = TextPages(1000)
    hashes = [(page, page * 7) for page in range(stride, count + 1, stride)]
    texts.learn(text_blocks(text), len(text), PromptPages(count, PAGE, hashes))
    chain = texts.pages_of(text_blocks(text))
    assert [page for page, _ in chain] == sorted({page for page, _ in chain})
    assert all(page <= count for page, _ in chain)


# ---------------------------------------------------------------------- choices


def test_a_prompt_of_ids_goes_where_its_pages_are():
    pool, policy = workers(4), CacheExact()
    tokens = ids(1, 320)
    policy.kv_index.apply(pool[2].id, [stored(tokens[:256])])
    policy.kv_index.apply(pool[3].id, [stored(tokens[:64])])
    for body in ({"input_ids": tokens}, {"prompt": tokens}):
        subject, request = read(policy, body)
        assert subject.amendment is None and not request.headers and request.on_head is None
        assert policy.choose(pool, subject) == Decision(pool[2], "cache_hit")


@pytest.mark.parametrize("asked, worker", [({}, 0), ({"cache_salt": "a"}, 1), ({"cache_salt": ["a", "z"]}, 1),
                                           ({"extra_key": "a"}, 2), ({"cache_salt": "a", "extra_key": "a"}, 3)])
def test_pages_of_another_namespace_are_no_hits(asked, worker):
    """Each worker has the same tokens in a namespace of its own, and the prompt goes to that of its own namespace."""
    tokens = ids(1, 320)
    pool, policy = workers(5), CacheExact()
    namespaces = SHARED, Namespace("a"), Namespace("", "a"), Namespace("a", "a")
    for each, namespace in zip(pool, namespaces):
        hashes = page_hashes(tokens, PAGE, namespace.seed)
        policy.kv_index.apply(each.id, [Stored(hashes, namespace.seed, tokens, PAGE)])
    for _ in range(2):  # then its segments are known
        subject, _ = read(policy, {"input_ids": tokens, **asked})
        pages, cached, _ = policy._cached_pages(subject)
        assert cached == {pool[worker].id: 20} and pages == 20
    assert policy.choose(pool, subject) == Decision(pool[worker], "cache_hit")
    subject, _ = read(policy, {"input_ids": tokens, "cache_salt": "new"})
    assert policy._cached_pages(subject) == (20, {}, {})
    assert policy.choose(pool, subject).reason == "cache_miss"


def test_texts_are_learnt_by_namespace():
    """The pages that an answer names are those of its namespace, and no other namespace's text is known by them."""
    (text, tokens), policy = words(1, 320), CacheExact()
    for salt in ("a", "b"):
        subject, _ = read(policy, {"text": text, "cache_salt": salt})
        assert subject.amendment is not None and policy._cached_pages(subject)[1] == {}
        line = f"{PROMPT_PAGES_HEADER}: {encode_pages(tokens, PAGE, Namespace(salt).seed)}\r\n".encode()
        head = b"HTTP/1.1 200 OK\r\n" + line + b"\r\n"
        subject.amendment.on_head(ResponseHead(ResponseFacts.read(200, head), head, len(head) - 2))
        again, _ = read(policy, {"text": text, "cache_salt": salt})
        assert again.amendment is None
        assert policy.texts.pages_of(again.blocks)[-1] == (20, page_hashes(tokens, PAGE, Namespace(salt).seed)[-1])


@pytest.mark.parametrize("value, salt", [('"a"', "a"), ('["a", "b"]', "a"), ("[]", ""), ("3", ""), ("null", "")])
def test_the_namespace_of_a_body(value, salt):
    fields = routing_fields(b'{"text": "x", "cache_salt": %b}' % value.encode())
    assert fields.namespace == Namespace(salt)


def test_an_eviction_and_a_restart_are_known_at_once():
    pool, policy = workers(2), CacheExact()
    tokens = ids(1, 320)
    policy.kv_index.apply(pool[1].id, [stored(tokens)])
    subject, _ = read(policy, {"input_ids": tokens})
    assert policy.choose(pool, subject) == Decision(pool[1], "cache_hit")
    policy.followed |= {worker.id for worker in pool}
    for _ in range(2):
        policy.sweep(0.0)
    policy.kv_index.apply(pool[1].id, [Cleared()])
    policy.recent.age()
    policy.sent.age(), policy.sent.age()
    assert policy.choose(pool, subject).reason == "cache_miss"


def test_a_queue_outweighs_few_pages_but_not_many():
    pool, policy = workers(2), CacheExact()
    policy.costs._mean_missing = 10.0
    short, long = ids(1, 5 * PAGE), ids(2, 200 * PAGE)
    policy.kv_index.apply(pool[0].id, [stored(short), stored(long)])
    pool[0].load = 20
    assert policy.choose(pool, read(policy, {"input_ids": short})[0]).worker is pool[1]
    assert policy.choose(pool, read(policy, {"input_ids": long})[0]).worker is pool[0]


def test_a_burst_of_one_new_prompt_stays_together_before_any_event():
    pool, policy = workers(4), CacheExact()
    policy.followed |= {worker.id for worker in pool}
    body = {"messages": [{"role": "user", "content": words(1, 500)[0]}]}
    home = policy.choose(pool, read(policy, body)[0]).worker
    assert policy.choose(pool, read(policy, body)[0]) == Decision(home, "cache_hit")
    policy.sweep(1.0), policy.sweep(2.0)
    assert policy.choose(pool, read(policy, body)[0]).reason == "cache_miss"


@pytest.mark.parametrize("cause", ["event", "restart"])
def test_a_cleared_cache_overrules_what_was_sent(cause):
    policy, fleet = CacheExact(), workers(3)
    others_policy = policy.of_another_model()
    for worker in fleet:
        policy.on_followed(worker)
    prompt = read(policy, {"text": "a" * 2000})[0]
    for each in (policy, others_policy):
        first = each.choose(fleet, prompt).worker
        assert each.choose(fleet, prompt) == Decision(first, "cache_hit")
        policy.on_events(first, [Cleared()]) if cause == "event" else policy.on_cleared(first)
        assert each.choose(fleet, prompt).reason == "cache_miss"
        assert each.choose(fleet, prompt).reason == "cache_hit"  # what was sent since then counts


def test_what_was_sent_unseen_yields_to_events():
    policy, fleet = CacheExact(), workers(3)
    prompt = read(policy, {"text": "a" * 2000})[0]
    first = policy.choose(fleet, prompt).worker
    for _ in range(3):
        policy.sweep(0.0)
    assert policy.choose(fleet, prompt) == Decision(first, "cache_hit")
    for _ in range(3):
        policy.sweep(0.0)
    for worker in fleet:
        policy.on_followed(worker)
    assert policy.choose(fleet, prompt).reason == "cache_miss"


@given(st.lists(st.tuples(st.sampled_from(["record", "forget", "turn"]), st.integers(0, 3), st.integers(0, 5)),
                max_size=40))
def test_a_prefix_memory_forgets_a_worker_and_nothing_else(steps):
    memory, young, old = PrefixMemory(2), {}, {}
    for kind, worker, block in steps:
        if kind == "record":
            memory.record([block], worker, 2**16)
            young[block] = young.get(block, old.get(block, set())) | {worker}
        elif kind == "forget":
            memory.forget(worker)
            young, old = ({b: w - {worker} for b, w in known.items()} for known in (young, old))
        else:
            memory.age()
            young, old = {}, young
        for block in range(6):
            workers, depth = memory.longest_match([block], frozenset(range(4)))
            assert (set(workers) if depth else set()) == (young[block] if block in young else old.get(block, set()))


def test_workers_that_publish_nothing_are_remembered():
    pool, policy = workers(4), CacheExact()
    body = {"messages": [{"role": "user", "content": words(1, 500)[0]}]}
    home = policy.choose(pool, read(policy, body)[0]).worker
    policy.sweep(1.0), policy.sweep(2.0)
    assert policy.choose(pool, read(policy, body)[0]) == Decision(home, "cache_hit")


def test_new_prompts_fill_the_emptiest_of_equals():
    pool, policy = workers(3), CacheExact()
    for worker, pages in zip(pool, (30, 10, 20)):
        policy.kv_index.apply(worker.id, [stored(ids(worker.id, pages * PAGE))])
    assert policy.choose(pool, read(policy, {"input_ids": ids(99, 64)})[0]) == Decision(pool[1], "cache_miss")


def test_a_lesson_is_taken_out_of_the_answer():
    policy = CacheExact()
    text, tokens = words(1, 400)
    subject, request = read(policy, {"text": text})
    assert not request.headers and request.on_head is None  # Reading changes nothing.
    assert f"{PROMPT_PAGES_HEADER}: ask\r\n".encode() in subject.amendment.headers
    plain = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-a: b\r\n\r\n{}"
    line = f"X-Baton-Prompt-Pages: {encode_pages(tokens, PAGE)}\r\n".encode()
    with_pages = plain.replace(b"x-a", line + b"x-a")
    size = with_pages.index(b"\r\n\r\n") + 4
    head = subject.amendment.on_head(ResponseHead(ResponseFacts.read(200, plain), with_pages, size))
    assert (head.data, head.size) == (plain, len(plain) - 2)
    assert policy.texts.knows(subject.blocks)
    assert read(policy, {"text": text})[0].amendment is None
    again = read(policy, {"text": text + "more"})[0].amendment
    assert again.on_head(ResponseHead(ResponseFacts.read(200, plain), plain, len(plain) - 2)).data == plain
    broken = plain.replace(b"x-a", b"x-baton-prompt-pages: 1;x\r\nx-a")
    assert again.on_head(ResponseHead(ResponseFacts.read(200, plain), broken, len(broken) - 2)).data == broken


@pytest.mark.parametrize("body", [{"input_ids": ["a"]}, {"prompt": [1, "a"]}, {"input_ids": [2**40]}, {"prompt": 5},
                                  {"input_ids": [[1, 2]]}, {"messages": []}, {}, {"input_ids": [1.5]}])
def test_odd_prompts_are_placed_too(body):
    pool, policy = workers(2), CacheExact()
    assert policy.choose(pool, read(policy, body)[0]).worker in pool


# ---------------------------------------------------------------------- pairs


def pairs(policy: CacheExact, prefills, decodes, tokens):
    return policy.choose_pair(prefills, decodes, read(policy, {"input_ids": tokens})[0])


def test_a_pair_is_chosen_by_both_caches():
    prefills, decodes, policy = workers(3, "p"), workers(3, "d"), CacheExact()
    tokens = ids(1, 640)
    policy.kv_index.apply(prefills[1].id, [stored(tokens)])
    policy.kv_index.apply(decodes[2].id, [stored(tokens)])
    assert pairs(policy, prefills, decodes, tokens) == (prefills[1], decodes[2], "cache_hit")


def test_pairs_prefer_one_host_unless_it_costs_more():
    """Near transfers save 8 % of a page's computing: worth a little, not a long queue."""
    prefills, decodes, policy = workers(3, "h"), workers(3, "h"), CacheExact()
    tokens = ids(1, 640)
    policy.kv_index.apply(prefills[2].id, [stored(tokens)])
    assert pairs(policy, prefills, decodes, tokens)[:2] == (prefills[2], decodes[2])
    decodes[2].load = 30
    prefill, decode, _ = pairs(policy, prefills, decodes, tokens)
    assert prefill is prefills[2]
    assert decode is not decodes[2]


def test_a_full_decode_worker_is_passed_over():
    prefills, decodes, policy = workers(1, "p"), workers(2, "d"), CacheExact()
    tokens = ids(1, 640)
    policy.costs.memory = {decodes[0].id: KVMemory(995.0, 1000.0), decodes[1].id: KVMemory(900.0, 1000.0)}
    decodes[1].load = 5
    assert pairs(policy, prefills, decodes, tokens).decode is decodes[1]


def test_running_tokens_count_even_where_another_router_sent_them():
    prefills, decodes, policy = workers(1, "p"), workers(2, "d"), CacheExact()
    policy.costs.memory = {decodes[0].id: KVMemory(5000.0, 10_000.0), decodes[1].id: KVMemory(100.0, 10_000.0)}
    assert pairs(policy, prefills, decodes, ids(1, 64)).decode is decodes[1]


@pytest.mark.parametrize("answered", ["at once", "late"])
def test_requests_that_ended_since_a_report_count_no_more(answered):
    prefills, decodes, policy = workers(1, "p"), workers(2, "d"), CacheExact()
    tokens = ids(1, 320)
    policy.kv_index.apply(decodes[0].id, [stored(tokens)])
    decodes[0].load = 1
    if answered == "late":  # The request ends between the question and the answer, which still counts it.
        decodes[0].load = 0
    policy.on_memory(decodes[0], MemoryReport(320, 32_000, 1))
    policy.on_memory(decodes[1], MemoryReport(0, 32_000))
    decodes[0].load = 0
    assert pairs(policy, prefills, decodes, tokens).decode is decodes[0]
    for _ in range(2):  # Now it is another router's.
        policy.on_memory(decodes[0], MemoryReport(320, 32_000, 1))
    assert pairs(policy, prefills, decodes, ids(2, 320)).decode is decodes[1]


def test_reports_of_memory_are_in_the_worker_s_pages():
    pool, policy = workers(2), CacheExact()
    policy.on_events(pool[0], [Stored([1, 2], None, (), 64)])
    policy.on_memory(pool[0], MemoryReport(640, 6400, 3))
    policy.on_memory(pool[1], MemoryReport(640, 6400))  # Its page size is unknown.
    assert policy.costs.memory == {pool[0].id: KVMemory(10.0, 100.0, 3), pool[1].id: KVMemory(40.0, 400.0)}
    assert (policy.cached_tokens(pool[0]), policy.cached_tokens(pool[1])) == (128, 0)
    policy.on_no_memory(pool[1])
    policy.on_removed(pool[0])
    assert not policy.costs.memory and policy.cached_tokens(pool[0]) == 0


def test_a_worker_that_is_followed_no_more_has_no_pages():
    pool, policy = workers(2), CacheExact()
    policy.on_followed(pool[0])
    policy.on_events(pool[0], [stored(ids(1, 64))])
    policy.on_lost(pool[0])
    assert not policy.followed and len(policy.kv_index) == 0


def test_the_share_of_a_prompt_that_the_cheapest_worker_has():
    pool, policy = workers(3), CacheExact()
    tokens = ids(1, 320)
    subject, _ = read(policy, {"input_ids": tokens})
    assert policy.cached_share(pool, None) == policy.cached_share(pool, subject) == 0.0
    policy.kv_index.apply(pool[1].id, [stored(tokens[:240])])
    assert policy.cached_share(pool, subject) == 0.75
    pool[1].load = 100
    assert policy.cached_share(pool, subject) == 0.0


def test_loads_far_apart_overrule_all_pages():
    pool, policy = workers(2), CacheExact()
    tokens = ids(1, 320)
    policy.kv_index.apply(pool[0].id, [stored(tokens)])
    pool[0].load = 100
    subject, _ = read(policy, {"input_ids": tokens})
    assert policy.choose(pool, subject) == Decision(pool[1], "balance")
    assert policy.choose(pool, None) == Decision(pool[1], "cache_miss")
    assert policy.choose(pool[:1], subject) == Decision(pool[0], "only")


def test_a_pair_is_chosen_for_a_request_without_a_prompt_and_where_loads_are_far_apart():
    prefills, decodes, policy = workers(2, "p"), workers(2, "d"), CacheExact()
    prefills[0].load = decodes[1].load = 100
    assert policy.choose_pair(prefills, decodes, None) == (prefills[1], decodes[0], "cache_miss")
    assert len(policy.recent) == len(policy.recent_decode) == 0


def test_of_decode_workers_on_one_host_the_cheapest_is_chosen():
    prefills, policy = workers(1, "h"), CacheExact()
    decodes = tuple(Worker(Endpoint.parse(f"http://h0:{port}")) for port in (81, 82, 83))
    decodes[0].load = decodes[2].load = 3
    assert pairs(policy, prefills, decodes, ids(1, 640)).decode is decodes[1]


def test_of_many_workers_those_with_most_cached_are_candidates():
    prefills, decodes, policy = workers(70, "p"), workers(70, "d"), CacheExact()
    tokens = ids(1, 640)
    for pool in (prefills, decodes):
        for worker in pool[:30]:
            worker.load = 1
    policy.kv_index.apply(prefills[3].id, [stored(tokens)])
    policy.kv_index.apply(decodes[4].id, [stored(tokens)])
    policy.kv_index.apply(-1, [stored(tokens)])  # neither's: one that fails health checks
    assert pairs(policy, prefills, decodes, tokens) == (prefills[3], decodes[4], "cache_hit")
    assert policy.choose(prefills, read(policy, {"input_ids": tokens})[0]).worker is prefills[3]


def test_processes_share_what_they_send_and_learn():
    applied = []

    class Joined:
        def channel(self, apply):
            applied.append(apply)
            return lambda subject, number, words: None

    policy = CacheExact()
    policy.replicate(Joined())
    assert len(applied) == 4
    pool = workers(3)
    subject, _ = read(policy, {"text": "a" * 2000})
    applied[2](subject.blocks, pool[1].id, 1000)
    assert policy.choose(pool, subject) == Decision(pool[1], "cache_hit")


def test_events_of_an_unknown_kind_change_nothing():
    kv_index = KVIndex()
    kv_index.apply(1, [object()])
    assert len(kv_index) == 0 and kv_index.sizes == {}


def test_a_worker_s_pages_are_bounded(monkeypatch):
    monkeypatch.setattr("baton.router.workers.kv_index.MAX_PAGES_PER_WORKER", 3)
    kv_index, tokens = KVIndex(), ids(1, 160)
    kv_index.apply(1, [stored(tokens)])
    assert kv_index.match(numbered(tokens)) == {1: 3}


def test_a_page_that_two_hashes_name_goes_with_the_first():
    """Another engine may cache the same tokens twice, under hashes of its own."""
    kv_index, tokens = KVIndex(), ids(1, PAGE)
    kv_index.apply(1, [Stored([b"a"], None, tokens, PAGE), Stored([b"b"], None, tokens, PAGE)], native=False)
    kv_index.apply(1, [Removed([b"a"])], native=False)
    assert kv_index.match(numbered(tokens)) == {}
    kv_index.apply(1, [Removed([b"b"])], native=False)
    assert kv_index.sizes == {1: 0}


def test_groups_of_former_workers_are_forgotten():
    groups, fleet = WorkerGroups(), [workers(2) for _ in range(9)]
    first = groups.of(fleet[0])
    assert groups.of(fleet[0]) is first and first.ids == {worker.id for worker in fleet[0]}
    for pool in fleet[1:]:
        groups.of(pool)
    assert groups.of(fleet[0]) is not first


# ---------------------------------------------------------------------- over sockets


class Publishing:
    """A prefix cache with its publisher, flushed by a task, as an engine's loop does."""

    def __init__(self, port: int):
        self.port = port
        self.start()

    def start(self) -> None:
        self.cache = KVCacheManager(256, PAGE)
        self.publisher = KVEventPublisher(self.cache.prefix_cache, "127.0.0.1", self.port)
        self.task = asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        now = 0.0
        while True:
            self.publisher.flush(now)
            now += 0.05
            await asyncio.sleep(0.01)

    def compute(self, tokens: list[int]) -> None:
        array = np.array(tokens, np.int32)
        table = self.cache.match_prefix(array, len(array))
        assert self.cache.allocate_slots(table, len(array))
        self.cache.release(table, array)

    def stop(self) -> None:
        self.task.cancel()
        self.publisher.close()


@pytest.fixture
async def publishing():
    made: list[Publishing] = []

    def start() -> Publishing:
        made.append(Publishing(free_ports(2)[0]))
        return made[-1]

    yield start
    for publisher in made:
        publisher.stop()


def policy_of(router) -> CacheExact:
    return router.dispatcher.policies.common["regular"]


def depths(router, tokens) -> set[int]:
    return set(policy_of(router).kv_index.match(numbered(tokens)).values())


async def test_requests_follow_what_the_workers_publish(worker, start_router, request_to, publishing, script):
    """Late subscription, events, eviction, a restart: each is seen, and requests go where the pages are."""
    caches = [publishing(), publishing()]
    tokens = ids(1, 160)
    caches[1].compute(tokens)  # before anybody listens
    mocks = [await worker(kv_events_port=cache.port, page_size=PAGE) for cache in caches]
    made = await start_router(*mocks, policy="cache_exact")
    await script.until(lambda: len(policy_of(made).followed) == 2 and depths(made, tokens) == {10})
    for _ in range(3):
        await request_to(made, "POST", "/generate", {"input_ids": tokens})
    assert [len(mock.posts) for mock in mocks] == [0, 3]
    caches[0].compute(longer := tokens + ids(2, 160))
    await script.until(lambda: depths(made, longer) == {10, 20})
    await request_to(made, "POST", "/generate", {"input_ids": longer})
    assert len(mocks[0].posts) == 1
    listed = (await request_to(made, "GET", "/list_workers")).json["workers"]
    assert sorted(entry["cached_tokens"] for entry in listed) == [160, 320]
    caches[0].stop()
    caches[0].start()  # the same port, an empty cache, and no message to the router
    await script.until(lambda: depths(made, longer) == {10}, 8)
    assert b"baton_router_kv_resyncs_total" in (await request_to(made, "GET", "/metrics")).body
    await request_to(made, "POST", "/generate", {"input_ids": tokens})
    caches[1].cache.flush()
    await script.until(lambda: depths(made, longer) == set())
    hits = made.metrics.decisions["regular", "cache_hit"]
    await request_to(made, "POST", "/generate", {"input_ids": tokens})  # sent there a moment ago, and evicted since
    assert made.metrics.decisions["regular", "cache_hit"] == hits


async def test_a_missed_batch_is_fetched(worker, start_router, publishing, script):
    cache = publishing()
    mock = await worker(kv_events_port=cache.port)
    made = await start_router(mock, policy="cache_exact")
    await script.until(lambda: policy_of(made).followed)
    lost, send = ids(5, 160), cache.publisher._publisher.send_multipart
    cache.publisher._publisher.send_multipart = lambda frames: None
    cache.compute(lost)
    await script.until(lambda: cache.publisher._listener.events == [])
    cache.publisher._publisher.send_multipart = send
    cache.compute(ids(6, 160))
    await script.until(lambda: depths(made, lost) == {10})


async def test_the_pages_of_a_chat_are_learnt_from_answers(worker, start_router, chat, publishing, script):
    """The second time a chat comes, its text leads to the worker that tables its pages."""
    caches = [publishing() for _ in range(3)]
    text, tokens = words(1, 600)

    def telling(index):
        async def answer(served):
            assert (PROMPT_PAGES_HEADER.encode(), b"ask") in served.headers or served.worker.taught
            served.worker.taught = True
            caches[index].compute(tokens)
            served.answer(extra=f"{PROMPT_PAGES_HEADER}: {encode_pages(tokens, PAGE)}\r\n".encode())
        return answer

    mocks = [await worker(telling(i), kv_events_port=cache.port) for i, cache in enumerate(caches)]
    made = await start_router(*mocks, policy="cache_exact")
    await script.until(lambda: len(policy_of(made).followed) == 3)
    messages = [{"role": "user", "content": text}]
    reply = await chat(made, messages=messages)
    assert PROMPT_PAGES_HEADER not in reply.headers
    await script.until(lambda: depths(made, tokens) == {37})
    policy = policy_of(made)
    policy.recent.age(), policy.recent.age()
    for _ in range(3):
        await chat(made, messages=messages)
    assert sorted(len(mock.posts) for mock in mocks) == [0, 0, 4]


async def test_a_foreign_publisher_is_followed_through_gaps(worker, start_router, script):
    """SGLang's form of announcing, no replay: after a gap the worker counts as empty."""
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    announced = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv"})
    mock = await worker(kv_events_config=announced)
    made = await start_router(mock, policy="cache_exact")
    first, second = ids(1, 32), ids(2, 32)

    def send(number, *events):
        publisher.send_multipart((b"kv", number.to_bytes(8, "big"), encode(1.0, events)))

    async def seen(tokens, number, *events):
        for _ in range(100):
            if depths(made, tokens) == {2}:
                return
            send(number, *events)
            await asyncio.sleep(0.02)
        raise AssertionError("the event did not arrive")

    await seen(first, 0, Stored([-1, -2], None, first, PAGE))
    send(5, Stored([-3, -4], None, second, PAGE))
    await script.until(lambda: depths(made, second) == {2})
    assert depths(made, first) == set()
    send(6, Stored([-5], None, [[1, 2]], PAGE))  # pairs of tokens, as speculative decoding counts them
    await script.until(lambda: depths(made, second) == set())
    await seen(first, 7, Stored([-1, -2], None, first, PAGE))
    context.destroy(linger=0)


@pytest.mark.parametrize(("info", "source"), [
    ({}, None),
    ({"kv_events_port": 0}, None),
    ({"kv_events_port": 5}, Source("tcp://w:5", "tcp://w:6", "kv-events", True)),
    ({"kv_events_config": '{"publisher": "null"}'}, None),
    ({"kv_events_config": "nonsense"}, None),
    ({"kv_events_config": '{"publisher": "zmq", "replay_endpoint": "tcp://*:5558"}'},
     Source("tcp://w:5557", "tcp://w:5558", "", False)),
])
def test_where_workers_say_that_they_publish(info, source):
    assert source_of(Worker(Endpoint.parse("http://w:80")), info) == source
