"""Steps that begin while pages of their prompts are still being loaded: each layer group waits for its own."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.kvcache.tiers import host
from baton.common.runner.layer_group_events import LayerGroupEvents
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.late_copies import LateCopies
from baton.tests.helpers.small_models import save_steep_qwen3

VOCAB = 96
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 41).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_steep_qwen3(folder, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
                     num_attention_heads=2, num_key_value_heads=1)
    return folder


def test_a_step_waits_for_each_layer_group_before_its_layers(checkpoint, monkeypatch):
    made, events = [], []

    def copies(context, memory):
        made.append(LateCopies(context, memory))
        return made[0]

    monkeypatch.setattr(host, "HostPageCopies", copies)
    monkeypatch.setattr(host.HostTier, "is_hidden", lambda self, copy, seconds: True)
    engine = Engine(checkpoint, cache={"num_layer_groups": 2}, tiers={"enable_hierarchical_cache": True})
    engine.start("a", PROMPT)
    first = tokens_of(engine.run())
    engine.cache._evict(engine.cache.num_cached)
    assert engine.cache.tier.num_pages >= 10
    device = made[0]
    load = device.load

    def recorded(*args):
        events.append(load(*args))
        return events[0]

    monkeypatch.setattr(device, "load", recorded)
    plan = LayerGroupEvents.after_layer

    def with_progress(self, after_group, loads=()):
        call = plan(self, after_group, loads)

        def after_layer(layer):
            events.append((layer, events[0].num_complete))
            call(layer)

        return after_layer if loads else call

    monkeypatch.setattr(LayerGroupEvents, "after_layer", with_progress)
    engine.start("a", PROMPT)
    outputs = engine.run()
    assert tokens_of(outputs) == first and outputs[-1].num_cached_tokens == 40
    assert events[0].waits == [0, 1, None]
    assert events[1:] == [(0, 1), (1, 1), (2, 2), (3, 2)], "the second group's pages came after the first's layers"
    assert not engine.cache.tier.step_loads


def test_a_store_of_pages_that_are_being_loaded_copies_what_was_loaded(checkpoint, monkeypatch):
    """The pages are evicted, and their keys dropped, before any step has waited for the load."""
    made = []

    def copies(context, memory):
        made.append(LateCopies(context, memory))
        return made[0]

    monkeypatch.setattr(host, "HostPageCopies", copies)
    engine = Engine(checkpoint, tiers={"enable_hierarchical_cache": True})
    tier, groups = engine.cache.tier, engine.runner.pool.groups
    groups[0][3] = 7
    tier.store([b"a"], np.array([3])).wait()
    tier.finish(tier.load([b"a"], np.array([5])))
    tier.free([b"a"])
    tier.store([b"a"], np.array([5])).wait_on_device()
    groups[0][5] = 0
    tier.load([b"a"], np.array([6])).wait()
    assert (groups[0][6] == 7).all()
