"""Settings that all tests share."""

import os
import sys

import pytest

# Tiny tensors: a second thread costs more in hand-over than it computes, and the machine has few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Servers that tests start would compile all modules of ours again, each of them, for as long as torch takes to import.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Where the system's RDMA libraries are installed, NIXL 1.5.1's UCX would load them beside the copy of libnl in its
# wheel, and the process dies in the second one's destructor when it exits. No test needs a card.
os.environ.setdefault("UCX_MODULES", "^ib,rdmacm")


@pytest.fixture
def unused_tcp_port() -> int:
    """In place of pytest-asyncio's, whose port the kernel may hand to any connection meanwhile."""
    from baton.tests.helpers.ports import free_port

    return free_port()
