"""Settings that all tests share."""

import os

import pytest

# Tiny tensors: a second thread costs more in hand-over than it computes, and the machine has few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where the system's RDMA libraries are installed, NIXL 1.5.1's UCX would load them beside the copy of libnl in its
# wheel, and the process dies in the second one's destructor when it exits. No test needs a card.
os.environ.setdefault("UCX_MODULES", "^ib,rdmacm")


@pytest.fixture
def unused_tcp_port() -> int:
    """In place of pytest-asyncio's, whose port the kernel may hand to any connection meanwhile."""
    from baton.tests.ports import free_port

    return free_port()


PROCESSES = ("/integration/", "/router/test_router_processes.py", "/router/test_dashboard.py", "/router/test_server.py",
             "/router/test_promises.py", "/kvtransfer/test_processes.py", "/common/test_dp.py", "/common/test_pp.py",
             "/common/test_tp.py", "/common/test_moe_ranks.py", "/common/test_scheduling_ranks.py")
"""Tests that kill, stop and time real processes. What they wait for is the kernel's to give on a busy machine."""


def pytest_collection_modifyitems(items):
    """A test of real processes that fails is tried again, twice; the summary tells how many were."""
    for item in items:
        if any(part in item.path.as_posix() for part in PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))
