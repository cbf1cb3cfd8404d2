"""A short run of tests/bench/router_fuzz.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[1] / "bench" / "router_fuzz.py"
_spec = importlib.util.spec_from_file_location("router_fuzz", _PATH)
assert _spec is not None and _spec.loader is not None
router_fuzz = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(router_fuzz)


@pytest.mark.parametrize("pairs", [False, True], ids=["whole", "pairs"])
async def test_random_requests_find_no_error_of_ours(pairs):
    statuses = await router_fuzz.fuzz(600, 7, pairs=pairs)
    assert statuses[200] > 40
    assert statuses[400] > 10
    assert statuses[401] > 20
