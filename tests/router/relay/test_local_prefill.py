"""--local-prefill-tokens: the part of a prompt that decode lacks decides, where the policy knows it."""

from __future__ import annotations

from random import Random

import pytest

from baton.common.api.kv_events import Stored, page_hashes
from baton.router.config.endpoint import Endpoint
from baton.router.net.body import RoutingFields, routing_fields
from baton.router.net.request import Request
from baton.router.policies.cache_aware import CacheAware, block_hashes
from baton.router.policies.cache_exact import CacheExact
from baton.router.workers.registry import Worker

OURS = {"stream_continuation": True}
PAGE = 16


def words(seed: int, count: int) -> str:
    rng = Random(seed)
    return " ".join(f"w{rng.randrange(10_000)}" for _ in range(count))


def turns(*texts: str) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


async def was_prefilled_locally(router, chat, p, messages) -> bool:
    """True if decode served the chat without prefill."""
    before = len(p.posts)
    assert (await chat(router, messages=messages)).status == 200
    return len(p.posts) == before


@pytest.mark.parametrize(("policy", "knows"), [("cache_aware", True), ("round_robin", False), ("cache_exact", True)])
async def test_a_long_prompt_that_decode_was_sent_before_is_prefilled_there(start_router, worker, chat, policy, knows):
    """The second turn of a long conversation is short for decode, which has the first one cached."""
    p, d, other = await worker(), await worker(**OURS), await worker(**OURS)
    router = await start_router(prefill=[p], decode=[d, other], local_prefill_tokens=100, policy=policy)
    long = words(1, 600)
    assert not await was_prefilled_locally(router, chat, p, turns(long))
    assert await was_prefilled_locally(router, chat, p, turns(long, "go on")) is knows
    if knows:
        assert sorted(len(decode.posts) for decode in (d, other)) == [0, 2]
    assert not await was_prefilled_locally(router, chat, p, turns(long, words(2, 600)))  # over 100 new tokens
    assert not await was_prefilled_locally(router, chat, p, turns(words(3, 600)))
    assert await was_prefilled_locally(router, chat, p, turns("hello"))


async def test_what_decode_publishes_counts(start_router, worker, request_to):
    """Pages that a decode server reports as cached need no prefill; those that it lost do."""
    p, d = await worker(), await worker(**OURS)
    router = await start_router(prefill=[p], decode=[d], local_prefill_tokens=64, policy="cache_exact")
    policy = router.dispatcher.policies.common["decode"]
    tokens = [Random(4).randrange(30_000) for _ in range(40 * PAGE)]
    (decode,) = router.registry.available("decode")
    policy.kv_index.apply(decode.id, [Stored(page_hashes(tokens, PAGE), None, tokens, PAGE)])
    body = {"input_ids": tokens + [1] * 50, "sampling_params": {}}
    assert (await request_to(router, "POST", "/generate", body)).status == 200
    assert (len(p.posts), len(d.posts)) == (0, 1)
    policy.kv_index.clear(decode.id)
    for memory in (policy.recent, policy.recent_decode, policy.sent):
        memory.age(), memory.age()
    assert (await request_to(router, "POST", "/generate", body)).status == 200
    assert len(p.posts) == 1


async def test_other_engines_always_get_a_prefill_worker(start_router, worker, chat):
    p, d = await worker(), await worker()
    router = await start_router(prefill=[p], decode=[d], local_prefill_tokens=100)
    for _ in range(2):
        assert not await was_prefilled_locally(router, chat, p, turns("hello"))


# ---------------------------------------------------------------------- policies


def pool(count: int) -> tuple[Worker, ...]:
    return tuple(Worker(Endpoint.parse(f"http://w{i}:80"), "decode") for i in range(count))


def test_cache_aware_estimates_the_share_that_the_chosen_worker_was_sent():
    workers, policy = pool(3), CacheAware()
    text = words(5, 700).encode()[:2560]
    prompt, longer = block_hashes(text), block_hashes(text + words(6, 700).encode()[:2560])
    assert policy.cached_share(workers, prompt) == 0.0
    home = policy.choose(workers, prompt).worker
    assert policy.cached_share(workers, prompt) == 1.0
    assert policy.cached_share(workers, longer) == 0.5
    sent = dict(policy.memory.blocks_sent)
    home.load = 9  # a quarter of 32 is the most that a holder may be ahead
    assert policy.cached_share(workers, prompt) == 0.0
    home.load = 100
    assert policy.cached_share(workers, prompt) == 0.0
    assert policy.memory.blocks_sent == sent  # telling is not deciding


def test_cache_exact_knows_the_share_that_the_chosen_worker_has():
    workers, policy = pool(2), CacheExact()
    tokens = list(range(20 * PAGE))
    policy.kv_index.apply(workers[1].id, [Stored(page_hashes(tokens[:15 * PAGE], PAGE), None, (), PAGE)])

    def share(found: RoutingFields) -> float:
        return policy.cached_share(workers, policy.read(Request(), found))

    assert share(routing_fields(b'{"input_ids": [%s]}' % ",".join(map(str, tokens)).encode())) == 0.75
    assert share(routing_fields(b'{"input_ids": [5, 6]}')) == 0.0
    assert share(routing_fields(b"{}")) == 0.0
    workers[1].load = 100
    assert share(routing_fields(b'{"input_ids": [%s]}' % ",".join(map(str, tokens)).encode())) == 0.0
