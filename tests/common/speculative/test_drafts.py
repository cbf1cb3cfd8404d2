"""Drafts as data that other processes send."""

import pytest

from baton.common.api.drafts import Drafts


@pytest.mark.parametrize("drafts, valid", [
    (Drafts((1, 2, 3)), True), (Drafts(()), True), (Drafts((1, 2, 3), (-1, 0, -1)), True), (Drafts((1, 9)), False),
    (Drafts((-1,)), False), (Drafts((1, 2), (-1,)), False), (Drafts((1, 2), (0, 0)), False),
    (Drafts((1, 2), (-1, -2)), False)], ids=str)
def test_only_drafts_of_known_tokens_and_earlier_parents_are_valid(drafts, valid):
    assert drafts.is_valid(9) is valid
