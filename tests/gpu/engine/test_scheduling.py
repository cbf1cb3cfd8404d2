"""Mixed steps, preemption and pages in pinned host memory on a GPU change no token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.common.scheduler.preemption.copy_rates import measure_link_bandwidth
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.tinychat.tasks import held_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    found = []
    for example in held_out(48, seed=43):
        ids = tokenizer.apply_chat_template(example.messages, tools=example.tools, add_generation_prompt=True)
        found.append(list(ids["input_ids"] if not isinstance(ids, list) else ids))
    return found


def run(prompts, *, first=None, **options):
    """Returns the engine and its answers. Prompts after ``first`` are sent later, and are more urgent."""
    options = {"page_size": 16, "max_total_tokens": 65536, "chunk": 512, "device": "cuda"} | options
    engine = Engine(CHECKPOINT, **options)
    if engine.scheduler.batcher.swap is not None:
        engine.scheduler.batcher.rates._link_bandwidth = 1e18
    for i, prompt in enumerate(prompts):
        if i == first:
            for _ in range(12):
                engine.scheduler.step(0.0)
        sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 7 + i} if i % 2 else {}
        late = first is not None and i >= first
        engine.start(str(i), prompt, max_new_tokens=96, ignore_eos=True, fields={"priority": int(late)}, **sampling)
    found = tokens_of(engine.run())
    return engine, [found[str(i)] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def reference(prompts):
    return run(prompts)[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_mixed_steps(prompts, reference, overlap):
    assert run(prompts, overlap=overlap, schedule={"enable_mixed_chunk": True})[1] == reference


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("radix", [False, True])
def test_pages_are_swapped_out_and_in(prompts, reference, overlap, radix):
    engine, found = run(prompts, overlap=overlap, radix=radix, max_total_tokens=6144, max_running=32, first=32,
                        schedule={
            "retract_host_memory_gb": 1.0, "enable_priority_scheduling": True,
            "priority_scheduling_preemption_threshold": 0})
    batcher = engine.scheduler.batcher
    assert found == reference
    assert batcher.retraction.num_preempted > 0 and batcher.swap.num_swapped_out == batcher.retraction.num_retracted


def test_copies_are_exact_and_the_bandwidth_is_measured():
    layout = KVLayout(groups=(8, 8), num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    pool = KVPool(layout, 256, "cuda")
    for group in pool.groups:
        group.normal_()
    before = [group.clone() for group in pool.groups]
    host = HostTier(TierContext(pool, 160 * layout.page_bytes, "--hicache-size"))
    pages = np.random.default_rng(0).permutation(256)[:150]
    keys = [b"%d" % page for page in pages]
    stored = host.store(keys, pages)
    assert stored.num_pages == host.num_pages == 150
    stored.wait_on_device()
    for group in pool.groups:
        group.zero_()  # after the copies, by the stream
    task = host.load(keys[30:], pages[30:])
    task.wait()
    assert task.num_pages == 120 and host.lookup([*keys, b"none"]) == 150
    for group, old in zip(pool.groups, before):
        assert torch.equal(group[pages[30:]], old[pages[30:]]) and not group[pages[:30]].any()
    assert measure_link_bandwidth(torch.device("cuda")) > 1e9
