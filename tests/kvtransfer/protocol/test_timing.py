"""Times of the transfer protocol: each leaves room for the next within the peer's timeout."""

from __future__ import annotations

import pytest

from baton.common.config.server import DisaggregationArgs
from baton.kvtransfer.protocol.timing import Timing


@pytest.mark.parametrize("peer_timeout", [0.3, 6.0, 60.0])
def test_silence_lease_and_teardown_fit_within_the_timeout(peer_timeout: float) -> None:
    timing = Timing(60.0, 30.0, peer_timeout)
    assert 0 < 2 * timing.tick <= timing.ping_interval
    assert timing.lease == pytest.approx(3 * timing.ping_interval)
    assert timing.lease < timing.silence_seconds < peer_timeout
    assert timing.teardown_seconds == pytest.approx(peer_timeout / 6)


def test_only_a_stall_of_a_ping_s_length_is_excused() -> None:
    timing = Timing(60.0, 30.0, 6.0)
    assert (timing.excused(0.9), timing.excused(1.0), timing.excused(7.0)) == (0.0, 1.0, 7.0)


def test_times_come_from_the_flags() -> None:
    args = DisaggregationArgs(disaggregation_bootstrap_timeout=5.0, kv_transfer_timeout=6.0, peer_timeout=7.0)
    assert Timing.of(args) == Timing(5.0, 6.0, 7.0)
