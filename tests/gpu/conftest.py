"""Settings of the GPU tests alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.tests.helpers.rank_processes import SECONDS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test waits for most is compilation, whose time depends on the machine's cores."""
    for item in items:
        if Path(__file__).resolve().parent in item.path.resolve().parents:
            item.add_marker(pytest.mark.timeout(1.2 * SECONDS))
