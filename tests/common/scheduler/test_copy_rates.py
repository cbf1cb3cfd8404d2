"""Measured rates: when pages are loaded and when they are computed."""

from __future__ import annotations

import pytest

from baton.common.distributed.tp import TPGroup
from baton.common.scheduler.preemption.copy_rates import AgreedRates


def measured(prefill: float, storage: list[float], **options: bool) -> AgreedRates:
    rates = AgreedRates(1e6, TPGroup(), **options)
    rates.prefill_rate.tokens_per_second = prefill
    rates.storage_rate = lambda: storage[0]
    rates.poll()
    return rates


def test_nothing_is_too_slow_until_it_was_measured():
    for prefill, storage in ((0.0, 1.0), (1e9, 0.0)):
        rates = measured(prefill, [storage])
        assert rates.should_read(1 << 40, 1) and not rates.page_costs(1 << 20, 16).get("tier_storage_page_cost")
    assert measured(0.0, [1.0]).should_load(1 << 40, 1) and not measured(0.0, [1.0]).page_costs(1, 16)


def test_a_storage_that_seemed_too_slow_is_tried_again_until_it_was_measured():
    storage = [1e3]
    rates = measured(1e3, storage)
    refused = 0
    while not rates.should_read(2000, 1000):  # 2 s by the rate, 1 s to compute
        refused += 1
        rates.poll()
    assert 30 < refused < 45
    storage[0] = 1001.0  # a read was measured, and was no faster
    rates.poll()
    assert not rates.should_read(2000, 1000)
    assert measured(1e3, storage, always_load=True).should_read(1 << 40, 1)
    assert measured(1e3, storage, always_load=True).should_load(1 << 40, 1)
    assert not measured(1e3, storage).should_load(1 << 40, 1)


def test_costs_are_shares_of_computing():
    rates = measured(1e3, [2e5])
    costs = rates.page_costs(1600, 16)  # 16 ms to compute, 1.6 ms over the link, 8 ms from the storage
    assert costs == pytest.approx({"tier_host_page_cost": 0.1, "tier_storage_page_cost": 0.6}, rel=0.15)
    assert rates.page_costs(160_000, 16) == {"tier_host_page_cost": 1.0, "tier_storage_page_cost": 1.0}
    always = measured(1e3, [2e5], always_load=True)
    assert always.page_costs(160_000, 16)["tier_host_page_cost"] > 5
