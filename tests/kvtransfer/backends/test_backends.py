"""What a backend does before any page travels: choosing it, its settings, and how it merges neighbours."""

from __future__ import annotations

import os

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import DisaggregationArgs
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.backends.mooncake import capture_stderr, find_runs
from baton.tests.kvtransfer.conftest import BACKENDS


@pytest.mark.parametrize("src, dst, expected", [
    ([5], [9], [(0, 1)]),
    ([5, 6, 7], [1, 2, 3], [(0, 3)]),
    ([5, 6, 7], [1, 2, 4], [(0, 2), (2, 1)]),
    ([5, 6, 9, 10], [1, 2, 3, 4], [(0, 2), (2, 2)]),
    ([7, 6, 5], [7, 6, 5], [(0, 1), (1, 1), (2, 1)])])
def test_runs_are_neighbours_on_both_sides(src, dst, expected):
    starts, lengths = find_runs(np.array(src), np.array(dst))
    assert list(zip(starts.tolist(), lengths.tolist())) == expected


def test_an_unknown_backend_is_a_sentence():
    with pytest.raises(ConfigError, match="must be auto, ipc, mooncake or nixl, not 'pigeon'"):
        make_backend("pigeon")


def test_devices_are_mooncakes():
    assert DisaggregationArgs(disaggregation_transfer_backend="mooncake", disaggregation_ib_device="mlx5_0")
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES"):
        DisaggregationArgs(disaggregation_ib_device="mlx5_0")


@pytest.mark.skipif("mooncake" not in BACKENDS, reason="needs Mooncake")
def test_mooncake_needs_an_address_that_peers_can_reach():
    with pytest.raises(ConfigError, match="not 0.0.0.0"):
        make_backend("mooncake", "0.0.0.0")


def test_mooncake_s_output_while_it_starts_does_not_reach_stderr(capfd):
    with capture_stderr() as lines:
        os.write(2, b"I1122 topology.cpp:201] No RDMA devices found\n")
    os.write(2, b"ours\n")
    assert lines == ["I1122 topology.cpp:201] No RDMA devices found"]
    assert capfd.readouterr().err == "ours\n"
