"""The draft model's KV pool: its size next to the model's, its memory, and its pages in tiers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from baton.common.api.errors import ConfigError
from baton.common.config.server import CacheArgs
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.common.models.registry import load_model_spec
from baton.common.runner.draft_weights import DraftWeights
from baton.common.runner.kv_sizing import _pages_within
from baton.common.scheduler.make_batcher import _host_tiers
from baton.common.weights.fingerprint import identify_draft
from baton.common.weights.slots import Slot
from baton.tests.helpers import hash_drafter
from baton.tests.helpers.dict_tier import DictTier
from baton.tests.helpers.small_models import load_runner, save_model, server_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, "Llama")
    return folder


def drafting_runner(checkpoint, name="HASH", **options):
    config = server_config(checkpoint, **options)
    return load_runner(dataclasses.replace(config, speculative=SpeculativeArgs(name)))


def test_a_page_of_the_draft_is_paid_for_with_each_of_the_model():
    layout = KVLayout(groups=(2,), num_kv_heads=1, head_dim=4, page_size=16, dtype="float32")
    draft = KVLayout(groups=(1,), num_kv_heads=1, head_dim=4, page_size=16, dtype="float32")
    assert layout.page_bytes == 2 * draft.page_bytes == 1024
    assert _pages_within(CacheArgs(), [layout], 30 * 1024) == 30
    assert _pages_within(CacheArgs(), [layout], 30 * 1024, draft) == 20
    windowed = KVLayout(groups=(1,), num_kv_heads=1, head_dim=4, page_size=16, dtype="float32", retained_tokens=16)
    half = CacheArgs(swa_full_tokens_ratio=0.5)
    pages = _pages_within(half, [layout, windowed], 70 * 1024, draft)
    assert pages == 40 and _pages_within(half, [layout, windowed], 70 * 1024) == 56


def test_the_pools_have_equal_pages(checkpoint):
    plain, runner = load_runner(server_config(checkpoint)), drafting_runner(checkpoint)
    assert plain.draft_pool is plain.drafter is plain.draft_model is None and plain.lookahead == 0
    assert runner.draft_pool.num_pages == runner.pool.num_pages == plain.pool.num_pages
    assert runner.lookahead == 1 and drafting_runner(checkpoint, "PLAIN_HASH").lookahead == 0
    assert isinstance(runner.drafter, hash_drafter.HashDrafter) and runner.drafter.pool is runner.draft_pool


def test_released_memory_includes_the_draft(checkpoint):
    runner = drafting_runner(checkpoint)
    runner.draft_pool.groups[0].fill_(3)
    runner.release(["kv_cache"])
    assert not any(group.untyped_storage().nbytes() for group in runner.draft_pool.groups)
    runner.resume(["kv_cache"], complete=True)
    assert runner.draft_pool.groups[0].untyped_storage().nbytes() and not runner.draft_pool.groups[0].any()


def pools():
    model = KVPool(KVLayout(groups=(1, 2), num_kv_heads=1, head_dim=2, page_size=4, dtype="float32"), 8, "cpu")
    draft = KVPool(KVLayout(groups=(1,), num_kv_heads=2, head_dim=2, page_size=4, dtype="bfloat16"), 8, "cpu")
    return model, draft


@pytest.mark.parametrize("make", [HostTier, DictTier])
def test_a_tier_keeps_the_draft_with_the_page(make):
    model, draft = pools()
    tier = make(TierContext(model, 1 << 20, "--hicache-size", draft))
    assert tier.page_bytes == model.layout.page_bytes + draft.layout.page_bytes
    every = [*model.groups, *draft.groups]
    for number, group in enumerate(every, 1):
        group[2:4] = torch.tensor([number * 10.0, number * 10.0 + 1]).view(2, *[1] * (group.dim() - 1))
    stored = tier.store([b"a", b"b"], np.array([2, 3]))
    assert stored.num_pages == 2
    stored.wait()
    for group in every:
        group.zero_()
    assert tier.load([b"a", b"b"], np.array([6, 1])).num_pages == 2
    for number, group in enumerate(every, 1):
        assert (group[6] == number * 10).all() and (group[1] == number * 10 + 1).all() and not group[2].any()


def test_host_memory_of_retracted_requests_is_shared_out_with_the_draft():
    model, draft = pools()
    windowed, _ = pools()
    first, second = _host_tiers([model, windowed], draft, 1 << 16)
    assert first.page_bytes == model.layout.page_bytes + draft.layout.page_bytes
    assert second.page_bytes == model.layout.page_bytes
    assert abs(first.capacity - second.capacity) <= 1


def test_layers_of_the_models_checkpoint_are_updated_with_it(checkpoint, tmp_path):
    """Layers of multi-token prediction; a draft model of its own keeps its weights."""
    class Draft:
        def __init__(self):
            self.target = torch.zeros(2, 3)

        def slots(self):
            return [Slot("model.layers.3.eh_proj.weight", self.target, (2, 3))]

    path = tmp_path / "with-layers"
    path.mkdir()
    save_file({"model.layers.3.eh_proj.weight": torch.full((2, 3), 5.0), "model.norm.weight": torch.ones(4)},
              path / "model.safetensors")
    config = server_config(checkpoint)
    spec = load_model_spec(config.model)
    args = dataclasses.replace(config.model, model_path=str(path))
    draft = Draft()
    weights = DraftWeights(config, spec, draft)
    before = weights.identity
    weights.check(args)
    assert not draft.target.any() and before == weights.identity == identify_draft(config.model)
    weights.update(args)
    assert (draft.target == 5).all() and weights.identity == identify_draft(args) != before
    with pytest.raises(ConfigError, match="lacks"):
        weights.check(config.model)
    own = Draft()
    apart = DraftWeights(dataclasses.replace(config, speculative=SpeculativeArgs(
        "HASH", speculative_draft_model_path=str(path))), spec, own)
    apart.check(config.model)
    apart.update(config.model)
    assert not own.target.any() and apart.identity == weights.identity
