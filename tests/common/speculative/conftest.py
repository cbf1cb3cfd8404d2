"""The model of the engine tests."""

from __future__ import annotations

import pytest

from baton.tests.helpers.small_models import save_steep_qwen3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A Qwen3 of 24 tokens."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_steep_qwen3(folder, vocab_size=24)
    return folder
