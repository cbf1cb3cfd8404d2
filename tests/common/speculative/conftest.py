"""The models of the engine tests."""

from __future__ import annotations

import pytest

from baton.tests.helpers.draft_models import save_models
from baton.tests.helpers.small_models import save_steep_qwen3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A Qwen3 of 24 tokens."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_steep_qwen3(folder, vocab_size=24)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A model and a draft model of random weights for each algorithm."""
    folder = tmp_path_factory.mktemp("drafts")
    save_models(folder)
    return folder


@pytest.fixture(scope="session")
def undrafted(models):
    """What the model answers without drafts."""
    from baton.tests.common.speculative.test_drafting_engine import answers
    return answers(models / "model")[1]
