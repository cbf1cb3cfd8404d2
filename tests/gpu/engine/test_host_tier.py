"""Pages in pinned host memory: copies on streams of their own, both ways to copy, and steps that begin before all layer
groups are there. No token changes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.tiers import slot_memory
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.hand_driven import Engine, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BACKENDS = ("kernel", "direct")
LAYOUT = KVLayout(groups=(3, 2), num_kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
NUM_PAGES = 64
DELAY_CYCLES = 2_000_000
"""About a millisecond of a stream, so that copies are late."""


def a_tier(backend: str, slots: int = 40, **context) -> tuple[HostTier, KVPool]:
    pool = KVPool(LAYOUT, NUM_PAGES + 1, "cuda")
    return HostTier(TierContext(pool, slots * LAYOUT.page_bytes, "--hicache-size", io_backend=backend, **context)), pool


def fill(pool: KVPool, pages: np.ndarray, values: list[float]) -> None:
    ids = torch.from_numpy(pages).cuda()
    for group in pool.groups:
        group[ids] = torch.tensor(values, dtype=group.dtype, device="cuda").view(-1, *[1] * (group.dim() - 1))


def check(pool: KVPool, pages: np.ndarray, values: list[float]) -> None:
    for group in pool.groups:
        found = group[torch.from_numpy(pages).cuda()].flatten(1)
        wanted = torch.tensor(values, dtype=group.dtype, device="cuda")[:, None]
        assert (found == wanted).all(), "a page has other content"


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_copies_beside_a_busy_stream(backend):
    """Pages are overwritten once the stream has waited, loads follow stores of the same slots at once, and evicted
    slots change hands while copies are in flight."""
    rng = np.random.default_rng(0)
    tier, pool = a_tier(backend)
    values: dict[bytes, float] = {}
    for step in range(150):
        names = [b"%d" % name for name in rng.choice(60, rng.integers(1, 20), replace=False)]
        torch.cuda._sleep(DELAY_CYCLES)
        if rng.integers(2):
            pages = rng.choice(NUM_PAGES // 2, len(names), replace=False)
            for name in names:
                values.setdefault(name, float(len(values) % 250 + 1))
            fill(pool, pages, [values[name] for name in names])
            task = tier.store(names, pages)
            task.wait_on_device()
            fill(pool, pages, [0.0] * len(names))
        else:
            present = [name for name in names if tier.lookup([name])]
            pages = NUM_PAGES // 2 + rng.choice(NUM_PAGES // 2, len(present), replace=False)
            load = tier.load(present, pages)
            if step % 3 == 0:
                for group in range(len(pool.groups)):
                    load.wait_on_device(group)
            else:
                load.wait_on_device()
            tier.finish(load)
            check(pool, pages, [values[name] for name in present])
        tier.poll()
        tier.check_integrity()
    torch.cuda.synchronize()
    tier.poll()
    into = np.zeros(tier.page_bytes, np.uint8)
    for name in values:
        if tier.read_slot(name, into):
            assert (torch.from_numpy(into).view(torch.bfloat16) == values[name]).all()
    assert tier.counters.loaded > 100 and tier.counters.evicted > 0
    tier.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_load_is_done_when_it_is_complete(backend):
    tier, pool = a_tier(backend)
    pages = np.arange(20)
    fill(pool, pages, list(range(20)))
    names = [b"%d" % page for page in pages]
    tier.store(names, pages).wait()
    torch.cuda._sleep(100 * DELAY_CYCLES)
    task = tier.load(names, pages + 30)
    assert not task.done and tier.loads.of_pages(pages + 30) is not None
    torch.cuda.synchronize()
    assert task.done and task.num_pages == 20
    check(pool, pages + 30, list(range(20)))
    tier.finish(task)
    assert not tier.step_loads


def test_memory_is_pinned_in_the_background(monkeypatch):
    monkeypatch.setattr(slot_memory.SlotMemory.__init__, "__kwdefaults__",
                        slot_memory.SlotMemory.__init__.__kwdefaults__ | {"chunk_bytes": 1 << 20})
    tier, pool = a_tier("kernel", slots=4000, in_background=True)
    assert 0 < tier.capacity < 4000
    end = time.monotonic() + 30
    while tier.num_allocated < 4000:
        assert time.monotonic() < end
        time.sleep(0.01)
    tier.grow(4000)
    slots = tier.reserve(3900)
    tier.unreserve(slots)
    fill(pool, np.arange(50), [3.0] * 50)
    tier.store([b"%d" % i for i in range(50)], np.arange(50)).wait()
    tier.load([b"%d" % i for i in range(50)], np.arange(10, 60)).wait()
    check(pool, np.arange(10, 60), [3.0] * 50)
    tier.close()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(10, 900, int(length)).tolist() for length in rng.integers(200, 900, 12)]


def ask_all(engine: Engine) -> tuple[list[list[int]], int]:
    """The answers, and the tokens that were not computed."""
    for number, prompt in enumerate(prompts()):
        engine.start(str(number), prompt, max_new_tokens=24, ignore_eos=True)
    end = time.monotonic() + 60
    while not engine.scheduler.idle:
        engine.scheduler.step(0.0)
        engine.tracker.flush()
        assert time.monotonic() < end
    outputs = engine.run()
    answers = tokens_of(outputs)
    return [answers[str(i)] for i in range(12)], sum(item.num_cached_tokens for item in outputs
                                                     if item.num_cached_tokens is not None)


@pytest.fixture(scope="module")
def reference():
    return ask_all(Engine(CHECKPOINT, page_size=16, max_total_tokens=32768, chunk=512, device="cuda"))[0]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend,policy", [("kernel", "write_through"), ("direct", "write_back")])
def test_prompts_from_host_memory(reference, monkeypatch, backend, policy, overlap, early):
    """``early``: each request starts at once, and its layers wait for their pages on the device."""
    if early:
        monkeypatch.setattr(HostTier, "is_hidden", lambda self, copy, seconds: True)
    engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=2560, chunk=512, device="cuda", overlap=overlap,
                    cache={"num_layer_groups": 2},
                    tiers={"enable_hierarchical_cache": True, "hicache_ratio": 8.0, "hicache_io_backend": backend,
                           "hicache_write_policy": policy})
    engine.scheduler.batcher.rates._link_bandwidth = 1e18
    assert ask_all(engine)[0] == reference
    again, cached = ask_all(engine)
    assert again == reference and engine.cache.tier.counters.loaded > 100 and cached > 3000
    engine.cache.tier.check_integrity()
