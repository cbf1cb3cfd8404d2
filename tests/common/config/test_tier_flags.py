"""Flags of KV tiers: sizes, and the extra configuration of storages."""

from __future__ import annotations

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import TierArgs


def test_the_size_is_a_multiple_of_the_pool_unless_it_is_given():
    assert TierArgs().host_bytes(1000) == 2000 and TierArgs(hicache_ratio=0.5).host_bytes(1000) == 500
    assert TierArgs(hicache_size=1.5).host_bytes(1000) == 1_500_000_000
    assert (TierArgs().host_flag, TierArgs(hicache_size=1).host_flag) == ("--hicache-ratio", "--hicache-size")


@pytest.mark.parametrize("in_file", [False, True])
def test_the_extra_configuration_is_json_or_a_file(tmp_path, in_file):
    text = '{"folder": "/kv", "prefetch_threshold": 64, "prefetch_timeout_base": 1}'
    if in_file:
        (tmp_path / "extra.json").write_text(text)
        text = f"@{tmp_path / 'extra.json'}"
    args = TierArgs(hicache_storage_backend_extra_config=text)
    assert args.storage_config == {"folder": "/kv"} and args.prefetch_limits.prefetch_threshold == 64
    assert TierArgs().prefetch_limits.prefetch_threshold == 256
    assert args.prefetch_limits.timeout(2048) == pytest.approx(1.2) and args.prefetch_limits.timeout(10**6) == 30


def test_fewer_tokens_are_worth_a_request_to_memory():
    flags = {"enable_hierarchical_cache": True, "hicache_storage_backend": "peers"}
    assert TierArgs(**flags).prefetch_limits.prefetch_threshold == 16
    extra = '{"prefetch_threshold": 300}'
    args = TierArgs(**flags, hicache_storage_backend_extra_config=extra)
    assert args.prefetch_limits.prefetch_threshold == 300


@pytest.mark.parametrize("fields, sentence", [
    ({"hicache_ratio": 0}, "--hicache-ratio must be above 0, not 0"),
    ({"hicache_size": -1}, "--hicache-size must be 0 or more, not -1"),
    ({"hicache_storage_backend_extra_config": "[]"}, "must be a JSON object, not []"),
    ({"hicache_storage_backend_extra_config": "@/nowhere"}, "@/nowhere cannot be read: No such file"),
    ({"hicache_storage_backend_extra_config": '{"prefetch_threshold": "x"}'}, "prefetch_threshold of --hicache-st"),
])
def test_what_cannot_be_is_refused(fields, sentence):
    with pytest.raises(ConfigError) as refused:
        TierArgs(**fields)
    assert sentence in str(refused.value)
