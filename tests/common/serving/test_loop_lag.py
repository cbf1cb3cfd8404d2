"""The lag of the API server's event loop."""

from __future__ import annotations

import asyncio
import time

from baton.common.serving.http_server import observe_loop_lag


async def test_a_blocked_loop_lags_by_that() -> None:
    seen: list[float] = []
    task = asyncio.create_task(observe_loop_lag(seen.append, 0.01))

    async def one_more() -> None:
        count = len(seen)
        while len(seen) == count:
            await asyncio.sleep(0.001)

    await one_more()
    asyncio.get_running_loop().call_soon(time.sleep, 0.2)
    await one_more()
    await one_more()
    task.cancel()
    assert min(seen) >= 0 and max(seen) > 0.15
