"""The API server's garbage collector: objects that live as long as the process are not walked while streams run."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

from baton.common.serving import http_server


async def test_the_api_server_freezes_the_collector_once_all_is_loaded(monkeypatch) -> None:
    freeze, ready, lag = Mock(), asyncio.Event(), asyncio.Event()
    context = MagicMock()
    context.config.observe.gc_warning_threshold_secs = 0.0

    async def observed(observe: object) -> None:
        lag.set()

    monkeypatch.setattr(http_server, "freeze_collector", freeze)
    monkeypatch.setattr(http_server, "observe_loop_lag", observed)
    with ExitStack() as stack:
        http_server.HTTPServer.observe_process(SimpleNamespace(_context=context, _stack=stack), ready)
        await asyncio.sleep(0)
        freeze.assert_not_called()
        ready.set()
        await lag.wait()
        freeze.assert_called_once_with()


def test_loaded_objects_are_not_walked_and_tokens_trigger_no_full_collection() -> None:
    code = """
import gc
from baton.common.garbage_collector import freeze_collector
freeze_collector()
assert gc.get_freeze_count() > 5000 and gc.get_count()[0] < 1000
before = gc.get_stats()[2]["collections"]
kept = [[i] for i in range(100_000)]  # as a hundred steps of a thousand streams
assert gc.get_stats()[2]["collections"] == before
"""
    assert gc.isenabled()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
