"""A front's garbage collector: nothing that lives as long as the process is walked while streams run."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

from baton.common.serving import server


async def test_a_front_settles_once_all_is_loaded(monkeypatch) -> None:
    settle = Mock()
    monkeypatch.setattr(server, "settle_collector", settle)
    host = SimpleNamespace(ready=asyncio.Event())
    task = asyncio.create_task(server._Server(host)._settle())
    await asyncio.sleep(0)
    settle.assert_not_called()
    host.ready.set()
    await task
    settle.assert_called_once_with()


def test_what_is_loaded_is_not_walked_and_tokens_set_off_no_full_collection() -> None:
    code = """
import gc
from baton.common.engine.garbage_collector import settle_collector
settle_collector()
assert gc.get_freeze_count() > 5000 and gc.get_count()[0] < 1000
before = gc.get_stats()[2]["collections"]
kept = [[i] for i in range(100_000)]  # as a hundred steps of a thousand streams
assert gc.get_stats()[2]["collections"] == before
"""
    assert gc.isenabled()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
